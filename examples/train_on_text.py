"""Train a GPT with head dim 64 on text, with our backward pass and with torch's, and hold the curves together.

    python examples/train_on_text.py --output train.jsonl                 on a GPU: 4 seeds, 300 steps, minutes
    python examples/train_on_text.py --backend undertow --seeds 1         one run, told and not kept
    python examples/train_on_text.py --compare train.jsonl --plot train.svg
    python examples/train_on_text.py --output cpu.jsonl                   without a GPU: a few steps of a tiny model

The text is what every Python brings: the sources of its standard library, byte by byte, a twentieth of it held out.
On a GPU both backends are scaled_dot_product_attention under bf16 autocast with the forward pass of torch's flash
kernel; `undertow` is `undertow.enable(forward="torch", strict=True)`, `torch` is the flash kernel as it comes, and
`torch-again` is the same once more. Seeds differ in the first weights; all runs see the same text in the same order.
Within a seed nothing but the backward pass of attention differs. Without a GPU, `undertow` is our kernel executed by
the emulator, and `torch` is what torch computes on a CPU.

The criterion, written down before the first comparison; n seeds, training losses in windows of 50 steps:

1. Seeds. The mean over seeds of the last window's loss differs between `undertow` and `torch` by no more than the
   95 % interval of the difference of two means of n runs, by the spread of `torch` over seeds.
2. Runs of one seed. `torch` does not repeat itself: its backward pass adds in any order. Over all windows and seeds the
   distance (RMS) of `undertow` from `torch` is no more than sqrt(F) times that of `torch-again` from `torch`, F the
   99 % quantile of the ratio of two variances of n values each: what two runs of one program exceed once in a hundred.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import undertow
from undertow.attention import counts, reset_counts
from undertow.integrations.sdpa import enable

HEAD_DIM = 64
BYTES = 256
HELD_OUT = 20  # one part in so many
WINDOW = 50  # steps
BACKENDS = ("undertow", "torch", "torch-again")
T_95 = {2: 4.303, 3: 2.776, 4: 2.447, 5: 2.306, 6: 2.228, 8: 2.145}  # two-sided, 2n - 2 degrees of freedom
F_99 = {2: 99.00, 3: 29.46, 4: 15.98, 5: 10.97, 6: 8.47, 8: 6.03}  # n and n degrees of freedom
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of a run. The learning rate rises linearly, and stays."""

    layers: int = 8
    heads: int = 12
    seqlen: int = 4096
    batch: int = 2
    steps: int = 300
    learning_rate: float = 6e-4
    rising_steps: int = 30
    evaluate_every: int = 50

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM


TINY = Config(layers=1, heads=1, seqlen=96, batch=1, steps=4, rising_steps=2, evaluate_every=2)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm and beside the residual."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.heads, self.attention = config.heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, HEAD_DIM)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Bytes in, logits of the next ones out."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, config.width)
        self.positions = nn.Embedding(config.seqlen, config.width)
        self.blocks = nn.Sequential(*(Block(config, attention) for _ in range(config.layers)))
        self.norm, self.logits = nn.LayerNorm(config.width), nn.Linear(config.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # smaller where it is added to the residual
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * config.layers) if deep else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return self.logits(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class Text:
    """training, held_out: bytes on the device. what: where they are from, how many, and their digest."""

    training: Tensor
    held_out: Tensor
    what: dict[str, Any]


def library_text(device: str) -> Text:
    """The modules of the standard library, in the order of their names; no packages, no tests."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = b"\n".join(path.read_bytes() for path in paths)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    cut = len(text) - len(text) // HELD_OUT
    what = {
        "what": f"{len(paths)} modules of the standard library of Python {platform.python_version()}",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return Text(text[:cut], text[cut:], what)


def windows(text: Tensor, starts: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The sequences that begin there, and their next bytes."""
    found = text[starts.to(text.device)[:, None] + torch.arange(config.seqlen + 1, device=text.device)].long()
    return found[:, :-1], found[:, 1:]


def attention_by(backend: str, device: str) -> Attention:
    """Causal attention of (batch, seqlen, heads, 64)."""
    if backend == "undertow" and device == "cpu":
        return lambda q, k, v: undertow.flash_attn_func(q, k, v, causal=True, backend="emulator")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attention


def in_force(backend: str, device: str) -> contextlib.AbstractContextManager[Any]:
    """What makes scaled_dot_product_attention the one that is asked for."""
    if device == "cpu":
        return contextlib.nullcontext()
    return enable(forward="torch", strict=True) if backend == "undertow" else sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def train(config: Config, backend: str, seed: int, text: Text, device: str) -> dict[str, Any]:
    """One run: losses of all steps, held-out losses, milliseconds of a step, and who computed the backward passes."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = GPT(config, attention_by(backend, device))
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / config.rising_steps))
    generator = torch.Generator().manual_seed(0)  # all runs see the same text: seeds differ in the first weights
    last = len(text.training) - config.seqlen - 1
    starts = torch.randint(last, (config.steps, config.batch), generator=generator).to(device)
    unseen = torch.arange(8) * ((len(text.held_out) - config.seqlen - 1) // 8)
    losses, held_out, clock = [], {}, Clock(device)

    def loss_of(of: Tensor, where: Tensor) -> Tensor:
        given, wanted = windows(of, where, config)
        with torch.autocast(device, torch.bfloat16):
            logits = model(given)
        return functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())

    reset_counts()
    with in_force(backend, device):
        for step in range(config.steps):
            clock.tick()
            loss = loss_of(text.training, starts[step])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rising.step()
            clock.tock()
            losses.append(loss.detach())
            if (step + 1) % config.evaluate_every == 0:
                with torch.no_grad():
                    held_out[step + 1] = torch.stack([loss_of(text.held_out, one[None]) for one in unseen]).mean()
    return {
        "losses": [round(value, 6) for value in torch.stack(losses).tolist()],
        "held_out": {step: round(float(loss), 6) for step, loss in held_out.items()},
        "step_ms": clock.milliseconds(config.steps // 10),
        "backward_passes": counts(),
    }


class Clock:
    """Times of steps: on the device, which the host does not wait for, or on the CPU."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []

    def tick(self) -> None:
        self._marks.append(self._now())

    tock = tick

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, unsettled: int) -> dict[str, float]:
        """Median, 20th and 80th percentile, of all steps but the first."""
        if self._on_gpu:
            torch.cuda.synchronize()
        pairs = list(zip(self._marks[::2], self._marks[1::2]))[unsettled:]
        found = [a.elapsed_time(b) if self._on_gpu else 1e3 * (b - a) for a, b in pairs]
        p20, median, p80 = (round(float(torch.tensor(found).quantile(q)), 3) for q in (0.2, 0.5, 0.8))
        return {"median": median, "p20": p20, "p80": p80}


def in_windows(losses: list[float]) -> list[float]:
    """Means of consecutive windows of steps; of a shorter run, all of it."""
    size = min(WINDOW, len(losses))
    return [statistics.fmean(losses[begin : begin + size]) for begin in range(0, len(losses) - size + 1, size)]


def distance(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    """RMS over seeds and windows."""
    pairs = [zip(in_windows(x["losses"]), in_windows(y["losses"])) for x, y in zip(a, b)]
    return math.sqrt(statistics.fmean((x - y) ** 2 for pair in pairs for x, y in pair))


def compare(records: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """What the records say by the criterion, line by line, and whether both parts hold."""
    seeds = sorted({r["seed"] for r in records if r["backend"] == "undertow"})
    runs = {name: [r for s in seeds for r in records if (r["backend"], r["seed"]) == (name, s)] for name in BACKENDS}
    n = len(seeds)
    if n not in T_95 or any(len(of) != n for of in runs.values()):
        have = {name: [r["seed"] for r in of] for name, of in runs.items()}
        raise SystemExit(f"a comparison needs one run of each of {BACKENDS}, of {sorted(T_95)} seeds; there are {have}")
    if any(r["config"] != records[0]["config"] or r["text"] != records[0]["text"] for r in records):
        raise SystemExit("the runs are not of one size on one text")
    ends = {name: [in_windows(r["losses"])[-1] for r in of] for name, of in runs.items()}
    noise = statistics.stdev(ends["torch"])
    apart = statistics.fmean(ends["undertow"]) - statistics.fmean(ends["torch"])
    allowed = T_95[n] * noise * math.sqrt(2 / n)
    ours, again = distance(runs["undertow"], runs["torch"]), distance(runs["torch-again"], runs["torch"])
    most = math.sqrt(F_99[n])
    if again == 0:
        raise SystemExit("torch repeated itself bit for bit, as on a CPU: without noise there is no criterion")
    lines = [
        f"{r['backend']:12} seed {r['seed']}: loss {in_windows(r['losses'])[-1]:.4f} in the last window, held out "
        f"{list(r['held_out'].values())[-1]:.4f}, {r['step_ms']['median']:.2f} ms a step"
        for r in records
    ]
    lines += [
        f"1. means over {n} seeds differ by {apart:+.4f}; allowed are {allowed:.4f} (spread over seeds {noise:.4f})",
        f"2. RMS from torch with the same seed: undertow {ours:.5f}, torch again {again:.5f}; allowed is a factor of "
        f"{most:.2f}, it is {ours / again:.2f}",
    ]
    return lines, abs(apart) <= allowed and ours <= most * again


def plot(path: Path, records: list[dict[str, Any]]) -> None:
    """Curves of all runs, and how far each is from torch's with the same seed."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "undertow"
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    colours = dict(zip(BACKENDS, ("#00798c", "#8d96a3", "#d1495b")))
    base = {r["seed"]: r["losses"] for r in records if r["backend"] == "torch"}
    named = set()
    for record in records:
        name = record["backend"]
        style = {"color": colours[name], "linewidth": 0.8, "label": None if name in named else name}
        named.add(name)
        curves.plot(record["losses"], **style)
        if name != "torch":
            apart = [x - y for x, y in zip(record["losses"], base[record["seed"]])]
            differences.plot(apart, **style)
    curves.set_ylabel("training loss, nats a byte")
    differences.set_ylabel("difference from torch, same seed")
    for axis in (curves, differences):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse(words: list[str] | None) -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    default = Config() if device == "cuda" else TINY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="may be repeated (default: all three)")
    parser.add_argument("--seeds", type=int, default=4 if device == "cuda" else 1, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="append a line a run (JSON)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="train nothing: hold the runs in it together")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --compare: draw the curves (SVG or PNG)")
    for name in ("layers", "heads", "seqlen", "batch", "steps", "evaluate_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    options = parser.parse_args(words)
    options.device, options.default = device, default
    return options


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    if options.compare:
        records = [json.loads(line) for line in options.compare.read_text().splitlines()]
        lines, holds = compare(records)
        print("\n".join([*lines, f"the criterion {'holds' if holds else 'DOES NOT HOLD'}"]))
        if options.plot:
            plot(options.plot, records)
        return 0 if holds else 1
    sizes = {name: getattr(options, name) for name in asdict(options.default) if hasattr(options, name)}
    config = replace(options.default, **sizes)
    text = library_text(options.device)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU ({platform.machine()})"
    for seed in range(options.seeds):
        for backend in options.backend or BACKENDS:
            record = {
                "backend": backend,
                "seed": seed,
                "device": where,
                "versions": {"undertow": undertow.__version__, "torch": torch.__version__},
                "config": asdict(config),
                "text": text.what,
                **train(config, backend, seed, text, options.device),
            }
            if options.output:
                with options.output.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            ends = [record["losses"][0], in_windows(record["losses"])[-1]]
            print(
                f"{backend}, seed {seed}: loss {ends[0]:.4f} to {ends[1]:.4f}, {record['step_ms']['median']:.2f} ms a "
                f"step, backward passes {record['backward_passes']}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

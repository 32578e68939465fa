# The DSL annotates its values with the union of all that they can be at trace time, which makes every line of a kernel
# a type error. So the type checker sees it as untyped; what a kernel may do is checked by compiling it.
from typing import Any

def __getattr__(name: str) -> Any: ...

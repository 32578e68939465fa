// How a handler deep inside says what went wrong: the fact alone; Python adds kernel, CTA, warp and source line.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>

namespace undertow {

enum class FaultKind : int { none = 0, memory = 1, protocol = 2, deadlock = 3, unsupported = 4, launch = 5 };

// Id of the finding that a fault amounts to, as in the Python errors; empty: the default of its kind.
struct Rule {
    const char* id = "";
};

constexpr Rule kPartialWarp{"partial-warp"};

struct Fault {
    FaultKind kind;
    std::string fact;
    std::string rule;
};

[[noreturn, gnu::cold]] inline void fail_with(FaultKind kind, Rule rule, const char* format, va_list arguments) {
    char text[1024];
    std::vsnprintf(text, sizeof(text), format, arguments);
    throw Fault{kind, text, rule.id};
}

[[noreturn, gnu::cold, gnu::format(printf, 2, 3)]] inline void fail(FaultKind kind, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fail_with(kind, Rule{}, format, arguments);
}

[[noreturn, gnu::cold, gnu::format(printf, 3, 4)]] inline void fail(FaultKind kind, Rule rule, const char* format,
                                                                     ...) {
    va_list arguments;
    va_start(arguments, format);
    fail_with(kind, rule, format, arguments);
}

}  // namespace undertow

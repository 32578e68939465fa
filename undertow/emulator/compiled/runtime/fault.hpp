// How a handler deep inside says what went wrong: the fact alone; Python adds kernel, CTA, warp and source line.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>

namespace undertow {

enum class FaultKind : int { none = 0, memory = 1, protocol = 2, deadlock = 3, unsupported = 4, launch = 5 };

struct Fault {
    FaultKind kind;
    std::string fact;
};

[[noreturn, gnu::cold, gnu::format(printf, 2, 3)]] inline void fail(FaultKind kind, const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    throw Fault{kind, text};
}

}  // namespace undertow

// What the `cpp` column of the semantics table may call (table.CPP_FUNCTIONS), one lane at a time.
// Everything is branch-free where it matters, so that the loops over 32 lanes vectorise.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "program.hpp"

namespace undertow {

using uint128_t = unsigned __int128;

template <class T, class S>
inline T bits(S x) {
    static_assert(sizeof(T) == sizeof(S));
    T y;
    std::memcpy(&y, &x, sizeof(T));
    return y;
}

inline float ftz(float x) {
    return std::fabs(x) < FLT_MIN ? bits<float>(bits<uint32_t>(x) & 0x80000000u) : x;
}

inline double ftz(double x) { return x; }  // .ftz concerns f32 only

// Clamp to [0, 1]; NaN and -0 become +0.
template <class T>
inline T sat(T x) {
    return x > T(0) ? (x < T(1) ? x : T(1)) : T(0);
}

// std::signbit, spelled so that vectorising it does not crash g++ 12.
inline bool is_negative(float x) { return bits<int32_t>(x) < 0; }
inline bool is_negative(double x) { return bits<int64_t>(x) < 0; }

// The smaller and the larger of two numbers with -0 below +0; a NaN on either side is dealt with by the callers.
template <class T>
inline T ordered_min(T a, T b) {
    return a < b || (a == b && is_negative(a)) ? a : b;
}

template <class T>
inline T ordered_max(T a, T b) {
    return a > b || (a == b && !is_negative(a)) ? a : b;
}

inline float canonical_nan(float) { return bits<float>(0x7fffffffu); }
inline double canonical_nan(double) { return bits<double>(uint64_t(0x7fffffffffffffffull)); }

template <class T>
inline T fmin_num(T a, T b) {
    T number = a != a ? b : b != b ? a : ordered_min(a, b);
    return number != number ? canonical_nan(number) : number;
}

template <class T>
inline T fmax_num(T a, T b) {
    T number = a != a ? b : b != b ? a : ordered_max(a, b);
    return number != number ? canonical_nan(number) : number;
}

template <class T>
inline T fmin_nan(T a, T b) {
    return a != a || b != b ? canonical_nan(a) : ordered_min(a, b);
}

template <class T>
inline T fmax_nan(T a, T b) {
    return a != a || b != b ? canonical_nan(a) : ordered_max(a, b);
}

// The neighbour of a finite or infinite float away from zero (+1) or towards zero (-1); steps through zero of a sign.
inline float float_up(float x) {
    int32_t i = bits<int32_t>(x);
    return x == 0.0f ? bits<float>(1) : bits<float>(i < 0 ? i - 1 : i + 1);
}

inline float float_down(float x) { return -float_up(-x); }

// double -> float with one rounding in mode n, z, m (down) or p (up).
inline float round_f32(double x, char mode) {
    float nearest = float(x);
    if (mode == 'n') return nearest;
    bool above = double(nearest) > x, below = double(nearest) < x;
    if (mode == 'z') {
        above = above && x > 0;
        below = below && x < 0;
    }
    if (above && mode != 'p') return x > 0 && mode == 'z' && nearest == FLT_TRUE_MIN ? 0.0f : float_down(nearest);
    if (below && mode != 'm') return float_up(nearest);
    return nearest;
}

// Round to odd: what a later rounding to fewer bits cannot tell from the exact value (Boldo and Melquiond, 2008).
inline double add_odd_double(double a, double b) {
    double s = a + b, bb = s - a, error = (a - (s - bb)) + (b - bb);
    uint64_t pattern = bits<uint64_t>(s);
    bool inexact = error != 0 && std::isfinite(s) && !(pattern & 1);
    bool grow = (error > 0) == (s > 0);
    return inexact ? bits<double>(grow ? pattern + 1 : pattern - 1) : s;
}

inline double add_odd(float a, float b) { return add_odd_double(a, b); }
inline double fma_odd(float a, float b, float c) { return add_odd_double(double(a) * double(b), c); }

inline float round_f32_odd(double x) {
    float nearest = float(x);
    uint32_t pattern = bits<uint32_t>(nearest);
    bool inexact = double(nearest) != x && x == x && !(pattern & 1);
    bool grow = std::fabs(x) > std::fabs(double(nearest));
    return inexact ? bits<float>(grow ? pattern + 1 : pattern - 1) : nearest;
}

// An integer as a double, rounded to odd where 53 bits do not hold it.
template <class T>
inline double odd_double(T x) {
    double nearest = double(x);
    __int128 back = __int128(nearest), exact = x;
    uint64_t pattern = bits<uint64_t>(nearest);
    bool is_inexact = back != exact && !(pattern & 1), grow = (exact > back) == (exact > 0);
    return is_inexact ? bits<double>(grow ? pattern + 1 : pattern - 1) : nearest;
}

inline float bf16_to_f32(uint16_t b) { return bits<float>(uint32_t(b) << 16); }

inline uint16_t f32_to_bf16(float x) {
    uint32_t u = bits<uint32_t>(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return x != x ? 0x7fffu : uint16_t(rounded);
}

inline float f16_to_f32(uint16_t h) {
    uint32_t magnitude = h & 0x7fffu, sign = uint32_t(h & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
    uint32_t special = 0x7f800000u | (magnitude << 13);
    float subnormal = float(int32_t(magnitude)) * 0x1p-24f;
    uint32_t value = magnitude >= 0x7c00u ? special : magnitude < 0x400u ? bits<uint32_t>(subnormal) : normal;
    return bits<float>(value | sign);
}

inline uint16_t f32_to_f16(float x) {
    uint32_t u = bits<uint32_t>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    // Adding 0.5 (in float, nearest even) drops a subnormal half's lost bits off the end of the significand.
    uint32_t subnormal = bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - ((127 - 15) << 23)) >> 13;
    uint32_t value = magnitude < 0x38800000u ? subnormal : normal;
    value = magnitude >= 0x477ff000u ? 0x7c00u : value;
    value = magnitude > 0x7f800000u ? 0x7fffu : value | sign;
    return uint16_t(value);
}

// The same in mode n, z, m or p.
inline uint16_t f32_to_bf16(float x, char mode) {
    if (mode == 'n') return f32_to_bf16(x);
    uint32_t u = bits<uint32_t>(x);
    bool away = (mode == 'm' && (u >> 31)) || (mode == 'p' && !(u >> 31));
    bool is_inexact = (u & 0xffffu) && (u & 0x7f800000u) != 0x7f800000u;
    return x != x ? 0x7fffu : uint16_t((u >> 16) + uint32_t(away && is_inexact));
}

inline uint16_t f32_to_f16(float x, char mode) {
    uint16_t nearest = f32_to_f16(x);
    if (mode == 'n' || x != x) return nearest;
    float wide = f16_to_f32(nearest);
    bool above = wide > x, below = wide < x, is_zero = !(nearest & 0x7fffu), is_negative = nearest >> 15;
    bool down = above && (mode == 'm' || (mode == 'z' && x > 0)), up = below && (mode == 'p' || (mode == 'z' && x < 0));
    if (down) return is_zero ? 0x8001u : uint16_t(is_negative ? nearest + 1 : nearest - 1);
    if (up) return is_zero ? 0x0001u : uint16_t(is_negative ? nearest - 1 : nearest + 1);
    return nearest;
}

// f32 with the low 13 bits cleared; mode n nearest even, a nearest with ties away from zero, z towards zero.
inline uint32_t f32_to_tf32(float x, char mode) {
    uint32_t u = bits<uint32_t>(x);
    u += mode == 'a' ? 0x1000u : mode == 'n' ? 0xfffu + (u >> 13 & 1u) : 0u;
    return x != x ? 0x7fffffffu : u & 0xffffe000u;
}

inline uint16_t finite_f16(uint16_t b) { return (b & 0x7fffu) == 0x7c00u ? uint16_t((b & 0x8000u) | 0x7bffu) : b; }
inline uint16_t finite_bf16(uint16_t b) { return (b & 0x7fffu) == 0x7f80u ? uint16_t((b & 0x8000u) | 0x7f7fu) : b; }

inline uint32_t finite_tf32(uint32_t b) {
    return (b & 0x7fffffffu) == 0x7f800000u ? (b & 0x80000000u) | 0x7f7fe000u : b;
}

inline uint16_t ftz_f16(uint16_t b) { return b & 0x7c00u ? b : uint16_t(b & 0x8000u); }

template <class T>
inline T relu(T x) {
    return x < T(0) ? T(0) : x;
}

template <class T>
inline T sign_of_product(T x, T a, T b) {
    return std::copysign(x, is_negative(a) != is_negative(b) ? T(-1) : T(1));
}

// Integer to integer with clamping.
template <class T, class S>
inline T clamp_to(S x) {
    using Wide = __int128;
    Wide low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max(), value = x;
    return T(value < low ? low : value > high ? high : value);
}

// Round a double to an integral double in mode n, z, m or p.
inline double round_int(double x, char mode) {
    return mode == 'n' ? std::nearbyint(x) : mode == 'z' ? std::trunc(x) : mode == 'm' ? std::floor(x) : std::ceil(x);
}

template <class T>
inline T clamp_int(double x, char mode) {
    double rounded = round_int(x, mode);
    constexpr double low = double(std::numeric_limits<T>::min());
    constexpr double high = double(std::numeric_limits<T>::max());  // rounds up to 2^63 or 2^64 for 64-bit types
    if (!(rounded == rounded)) return 0;
    if (rounded <= low) return std::numeric_limits<T>::min();
    if (rounded >= high) return std::numeric_limits<T>::max();
    return T(rounded);
}

inline uint32_t mulhi(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }
inline int32_t mulhi(int32_t a, int32_t b) { return int32_t((int64_t(a) * b) >> 32); }
inline uint64_t mulhi(uint64_t a, uint64_t b) { return uint64_t((unsigned __int128)(a)*b >> 64); }
inline int64_t mulhi(int64_t a, int64_t b) { return int64_t((__int128)(a)*b >> 64); }

inline uint32_t popc(uint32_t x) { return uint32_t(__builtin_popcount(x)); }
inline uint32_t popc(uint64_t x) { return uint32_t(__builtin_popcountll(x)); }
inline uint32_t clz(uint32_t x) { return x ? uint32_t(__builtin_clz(x)) : 32u; }
inline uint32_t clz(uint64_t x) { return x ? uint32_t(__builtin_clzll(x)) : 64u; }

inline uint32_t brev(uint32_t x) {
    x = ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1);
    x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
    x = ((x >> 4) & 0x0f0f0f0fu) | ((x & 0x0f0f0f0fu) << 4);
    return __builtin_bswap32(x);
}

inline uint64_t brev(uint64_t x) {
    return uint64_t(brev(uint32_t(x))) << 32 | brev(uint32_t(x >> 32));
}

// 2**a in double, rounded once to float. The polynomial is the Chebyshev interpolant of (2**f - 1) / f on
// [-1/2, 1/2], relative error 1.3e-17; measured: the same float as float(std::exp2(double(a))) for every float a.
inline float EX2(float a) {
    double x = a;
    x = x > 200.0 ? 200.0 : x;
    x = x < -200.0 ? -200.0 : x;
    constexpr double magic = 0x1.8p52;  // adding it leaves round(x) in the low bits
    double shifted = x + magic, f = x - (shifted - magic);
    double q = 0x1.e9d3fe3952179p-32;
    q = __builtin_fma(q, f, 0x1.e6063f7217bc6p-28);
    q = __builtin_fma(q, f, 0x1.b524fae627834p-24);
    q = __builtin_fma(q, f, 0x1.62bfd47773353p-20);
    q = __builtin_fma(q, f, 0x1.ffcbfc670dcd4p-17);
    q = __builtin_fma(q, f, 0x1.430913096fd9fp-13);
    q = __builtin_fma(q, f, 0x1.5d87fe78a5276p-10);
    q = __builtin_fma(q, f, 0x1.3b2ab6fba1ddap-7);
    q = __builtin_fma(q, f, 0x1.c6b08d704a0c2p-5);
    q = __builtin_fma(q, f, 0x1.ebfbdff82c598p-3);
    q = __builtin_fma(q, f, 0x1.62e42fefa39efp-1);
    double r = __builtin_fma(q, f, 1.0);
    return float(bits<double>(bits<uint64_t>(r) + (bits<uint64_t>(shifted) << 52)));
}

inline float LG2(float a) { return float(std::log2(double(a))); }
inline float RCP(float a) { return float(1.0 / double(a)); }
inline float RSQRT(float a) { return float(1.0 / std::sqrt(double(a))); }
inline float SQRT(float a) { return float(std::sqrt(double(a))); }
inline float TANH(float a) { return float(std::tanh(double(a))); }
inline float SIN(float a) { return float(std::sin(double(a))); }
inline float COS(float a) { return float(std::cos(double(a))); }

}  // namespace undertow

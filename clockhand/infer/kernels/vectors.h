// Vectors of floats, as wide as the processor that this is built for has them: GCC's and Clang's own vector types, so
// that one source serves x86-64 with AVX2 or AVX-512 and arm64.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 32;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

struct bfloat16 {  // the upper half of a float
    uint16_t bits;
};

INLINE float widen(bfloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
INLINE float widen(float x) { return x; }

// To the nearest, of two the even one; NaN stays NaN.
INLINE void narrow(float x, bfloat16& to) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
INLINE void narrow(float x, float& to) { to = x; }

template <class Vector>
INLINE Vector load(const void* from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class Vector>
INLINE void store(void* to, Vector v) {
    memcpy(to, &v, sizeof v);
}

INLINE Floats load_floats(const float* from) { return load<Floats>(from); }
INLINE Floats load_floats(const bfloat16* from) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
    return (Floats)(__builtin_convertvector(load<Halves>(from), Bits) << 16);
}

// The first `count` of a vector, zeros behind them. Nothing behind them is read.
template <class T>
INLINE Floats load_part(const T* from, int count) {
    if (count >= LANES) return load_floats(from);
    T part[LANES] = {};
    for (int i = 0; i < count; i++) part[i] = from[i];
    return load_floats(part);
}
INLINE void store_part(float* to, Floats v, int count) {
    if (count >= LANES) return store(to, v);
    for (int i = 0; i < count; i++) to[i] = v[i];
}

// Comparisons are written so that NaN is passed on.
INLINE Floats larger(Floats a, Floats b) { return a < b ? b : a; }

INLINE float sum(Floats v) {
    float part[LANES], total[4] = {};
    store(part, v);
    for (int i = 0; i < LANES; i++) total[i % 4] += part[i];
    return (total[0] + total[1]) + (total[2] + total[3]);
}
INLINE float largest(Floats v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = most < v[i] ? v[i] : most;
    return most;
}

// exp(x), to 2 units of the last bit: 2ⁿ · eʳ with |r| ≤ ln 2 / 2, and for eʳ its series. 0 below -87, NaN stays NaN.
INLINE Floats exponential(Floats x) {
    const Floats low = Floats{} - 87.33f, high = Floats{} + 88.72f;
    const Ints nothing = x < low;
    x = larger(x, low);
    x = x > high ? high : x;
    const Floats magic = Floats{} + 12582912.f;  // 1.5 · 2²³: what is added to it is rounded to a whole number
    const Floats shifted = x * 1.44269504f + magic;
    const Floats n = shifted - magic;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    Floats series = Floats{} + 1 / 5040.f;
    for (const float term : {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 1 / 2.f, 1.f, 1.f}) series = series * r + term;
    // n up to 128: as two factors, since 2¹²⁸ is no float.
    const Ints half = ((Ints)shifted - (Ints)magic) >> 1, rest = ((Ints)shifted - (Ints)magic) - half;
    series = series * (Floats)((half + 127) << 23) * (Floats)((rest + 127) << 23);
    return nothing ? Floats{} : series;
}

// LANES vectors become the columns of themselves: each of the log₂ LANES passes deals two halves into each other.
INLINE void transpose(Floats* v) {
    Floats other[LANES];
    Floats *from = v, *to = other;
#pragma GCC unroll 4
    for (int pass = 1; pass < LANES; pass *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            const Floats a = from[i], b = from[i + LANES / 2];
#if defined(__AVX512F__)
            to[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            to[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
            to[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            to[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            to[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            to[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
        Floats* const swap = from;
        from = to, to = swap;
    }
    if (from != v)
        for (int i = 0; i < LANES; i++) v[i] = from[i];
}

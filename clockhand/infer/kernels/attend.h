// Queries look back over what their sequence has remembered: one KV head, a few neighbouring positions at a time.
//
// Keys are taken in blocks that begin at multiples of BLOCK, with a running maximum and sum (Milakov & Gimelshein 2018;
// Dao et al. 2022), so that a query does the same arithmetic whoever is asked beside it. What a query must not see is
// never multiplied by: a NaN there would spread.

#pragma once

#include <vector>

#include "vectors.h"

constexpr int BLOCK = 64;    // keys whose scores are in memory at once
constexpr int TOGETHER = 4;  // queries in registers
constexpr int AHEAD = 16;     // positions: so far ahead values are fetched; keys, a group
constexpr int WIDE_TILE = REGISTERS == 32 ? 4 : 2;  // groups of keys in registers

// Asks for `count` numbers before they are needed.
template <class T>
INLINE void fetch(const T* at, int count) {
    for (int d = 0; d < count; d += 64 / (int)sizeof(T)) __builtin_prefetch(at + d);
}

// The keys or values of one KV head in one slot: a ring of `capacity` positions, `stride` numbers apart.
template <class T>
struct Memory {
    const T* data;
    int64_t stride, capacity;
    const T* at(int64_t position) const {  // a division is as long as all else that is done with a key
        return data + (position < capacity ? position : position % capacity) * stride;
    }
};

struct Query {
    int64_t position, first;  // it sees the positions from `first` to its own
};

// Room for the work of one thread.
struct AttendRoom {
    std::vector<float> queries, scores, columns;
    std::vector<Query> of;
    std::vector<float*> out;
    void fit(int count, int head_dim) {
        const size_t width = (head_dim + LANES - 1) / LANES * LANES;
        if (queries.size() < count * width) queries.resize(count * width);
        if (scores.size() < (size_t)count * BLOCK) scores.resize(count * BLOCK);
        if (columns.size() < width * BLOCK) columns.resize(width * BLOCK);
        if (of.size() < (size_t)count) of.resize(count), out.resize(count);
    }
};

// scores[i][..] of `some` queries over `groups` of LANES keys: every sum takes one number after another.
template <int some, int groups>
INLINE void tile_of_scores(const float* queries, int64_t width, int head_dim, const float* columns, float* scores) {
    Floats total[some][groups] = {};
    for (int d = 0; d < head_dim; d++) {
        Floats key[groups];
#pragma GCC unroll 4
        for (int g = 0; g < groups; g++) key[g] = load<Floats>(columns + d * BLOCK + g * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < some; i++)
#pragma GCC unroll 4
            for (int g = 0; g < groups; g++) total[i][g] += key[g] * queries[i * width + d];
    }
    for (int i = 0; i < some; i++)
        for (int g = 0; g < groups; g++) store(scores + i * BLOCK + g * LANES, total[i][g]);
}

template <int some>
static void scores_of_some(const float* queries, int64_t width, int head_dim, const float* columns, int first, int last,
                           float* scores) {
    int g = first;
    for (; g + WIDE_TILE <= last; g += WIDE_TILE)
        tile_of_scores<some, WIDE_TILE>(queries, width, head_dim, columns + g * LANES, scores + g * LANES);
    for (; g < last; g++) tile_of_scores<some, 1>(queries, width, head_dim, columns + g * LANES, scores + g * LANES);
}

// scores[i][BLOCK] of `count` queries over the keys [begin, end) of one block, whose columns become rows first.
template <class T>
static void scores_of(const Memory<T>& keys, const float* queries, int64_t width, int count, int head_dim, int64_t block,
                      int64_t begin, int64_t end, float* columns, float* scores) {
    const int first = (begin - block) / LANES, last = (end - block + LANES - 1) / LANES;
    for (int g = first; g < last; g++) {
        const T* at[LANES];
        for (int i = 0; i < LANES; i++) {
            const int64_t position = block + g * LANES + i;
            at[i] = position >= begin && position < end ? keys.at(position) : nullptr;
            if (at[i]) fetch(at[i] + LANES * keys.stride, head_dim);
        }
        for (int d = 0; d < head_dim; d += LANES) {
            Floats part[LANES];
            for (int i = 0; i < LANES; i++) part[i] = at[i] ? load_part(at[i] + d, head_dim - d) : Floats{};
            transpose(part);
            for (int i = 0; i < LANES; i++) store(columns + (d + i) * BLOCK + g * LANES, part[i]);
        }
    }
    int q = 0;
    for (; q + TOGETHER <= count; q += TOGETHER)
        scores_of_some<TOGETHER>(queries + q * width, width, head_dim, columns, first, last, scores + q * BLOCK);
    for (; q + 2 <= count; q += 2)
        scores_of_some<2>(queries + q * width, width, head_dim, columns, first, last, scores + q * BLOCK);
    if (q < count) scores_of_some<1>(queries + q * width, width, head_dim, columns, first, last, scores + q * BLOCK);
}

// out[i][d] += Σ weight[i] · value over the positions [begin, end), for `together` queries.
template <class T, int together>
static void add_values(const Memory<T>& values, const float* weights, int64_t block, int64_t begin, int64_t end,
                       int head_dim, float* const* out) {
    constexpr int WIDE = 4;
    int d = 0;
    for (; d + WIDE * LANES <= head_dim; d += WIDE * LANES) {
        Floats total[together][WIDE];
        for (int i = 0; i < together; i++)
            for (int v = 0; v < WIDE; v++) total[i][v] = load<Floats>(out[i] + d + v * LANES);
        for (int64_t s = begin; s < end; s++) {
            const T* const at = values.at(s) + d;
            fetch(at + AHEAD * values.stride, WIDE * LANES);
            Floats value[WIDE];
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) value[v] = load_floats(at + v * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < together; i++)
#pragma GCC unroll 4
                for (int v = 0; v < WIDE; v++) total[i][v] += value[v] * weights[i * BLOCK + (s - block)];
        }
        for (int i = 0; i < together; i++)
            for (int v = 0; v < WIDE; v++) store(out[i] + d + v * LANES, total[i][v]);
    }
    for (; d < head_dim; d += LANES) {
        const int count = head_dim - d < LANES ? head_dim - d : LANES;
        Floats total[together];
        for (int i = 0; i < together; i++) total[i] = load_part(out[i] + d, count);
        for (int64_t s = begin; s < end; s++) {
            const Floats value = load_part(values.at(s) + d, count);
#pragma GCC unroll 4
            for (int i = 0; i < together; i++) total[i] += value * weights[i * BLOCK + (s - block)];
        }
        for (int i = 0; i < together; i++) store_part(out[i] + d, total[i], count);
    }
}

// `count` queries, those of room.of with room.queries [count][width] already scaled, into out[i] (head_dim).
template <class T>
static void attend(const Memory<T>& keys, const Memory<T>& values, AttendRoom& room, int count, int head_dim,
                   float* const* out) {
    const int64_t width = (head_dim + LANES - 1) / LANES * LANES;
    const Query* const of = room.of.data();
    std::vector<float> peak(count, -INFINITY), total(count, 0.f);
    int64_t first = of[0].first, last = of[0].position;
    for (int q = 0; q < count; q++) {
        first = of[q].first < first ? of[q].first : first;
        last = of[q].position > last ? of[q].position : last;
        memset(out[q], 0, 4 * head_dim);
    }
    for (int64_t block = first / BLOCK * BLOCK; block <= last; block += BLOCK) {
        const int64_t begin = first > block ? first : block, end = last + 1 < block + BLOCK ? last + 1 : block + BLOCK;
        float* const scores = room.scores.data();
        scores_of(keys, room.queries.data(), width, count, head_dim, block, begin, end, room.columns.data(), scores);
        const auto from = [&](int q) { return of[q].first > block ? of[q].first : block; };
        const auto to = [&](int q) { return of[q].position + 1 < end ? of[q].position + 1 : end; };
        for (int q = 0; q < count; q++) {
            float* const own = scores + q * BLOCK;
            const int64_t low = from(q) - block, high = to(q) - block;
            if (low >= high) continue;
            for (int64_t s = 0; s < low; s++) own[s] = -INFINITY;
            for (int64_t s = high; s < BLOCK; s++) own[s] = -INFINITY;
            Floats most = load<Floats>(own);
            for (int s = LANES; s < BLOCK; s += LANES) most = larger(most, load<Floats>(own + s));
            const float before = peak[q], now = largest(most);
            const float top = before < now ? now : before;
            Floats sum_of = {};
            for (int s = 0; s < BLOCK; s += LANES) {
                const Floats weight = exponential(load<Floats>(own + s) - top);
                store(own + s, weight);
                sum_of += weight;
            }
            if (before != top && before != -INFINITY) {
                const float less = exponential(Floats{} + (before - top))[0];
                total[q] *= less;
                for (int d = 0; d < head_dim; d++) out[q][d] *= less;
            }
            peak[q] = top;
            total[q] += sum(sum_of);
        }
        for (int q = 0; q < count;) {
            int alike = 1;
            while (alike < TOGETHER && q + alike < count && from(q + alike) == from(q) && to(q + alike) == to(q)) alike++;
            if (alike == 3) alike = 2;
            if (from(q) < to(q)) {
                const float* const own = scores + q * BLOCK;
                const auto add = alike == 1 ? add_values<T, 1> : alike == 2 ? add_values<T, 2> : add_values<T, TOGETHER>;
                add(values, own, block, from(q), to(q), head_dim, out + q);
            }
            q += alike;
        }
    }
    for (int q = 0; q < count; q++)
        for (int d = 0; d < head_dim; d++) out[q][d] /= total[q];
}

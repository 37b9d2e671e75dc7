// The step, read downward: embed, for each layer attend and think, and the scores of those rows that want them.
//
// All threads walk through this together. A phase ends where they meet; within one, rows, heads or blocks of a matrix
// are taken one by one by whoever is free.

#include "step.h"

#include <new>

#include "attend.h"
#include "threads.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int LARGEST_TURN = 16;  // positions of one sequence that attend together

template <class T>
struct Buffer {
    T* data = nullptr;
    size_t size = 0;
    ~Buffer() { operator delete(data, std::align_val_t(64)); }
    T* fit(size_t wanted) {
        if (wanted > size) {
            operator delete(data, std::align_val_t(64));
            data = nullptr, size = 0;
            data = (T*)operator new(sizeof(T) * wanted, std::align_val_t(64));
            memset((void*)data, 0, sizeof(T) * wanted);
            size = wanted;
        }
        return data;
    }
};

struct Turn {  // neighbouring positions of one slot
    int32_t row, count;
};

}  // namespace

struct Workspace {
    Buffer<float> x, normed, qkv, attended, hidden, answers, logits;
    Buffer<char> operand;
    Buffer<float> operand_scale;
    Buffer<int32_t> operand_zero, expert, pairs, begins;
    Buffer<float> expert_weight;
    std::vector<Turn> turns;
    std::vector<AttendRoom> rooms;
};

namespace {

void norm(const Norm& norm, bool layer_norm, float eps, const float* x, int width, float* y) {
    if (norm.weight == nullptr) {
        if (x != y) memcpy(y, x, 4 * width);
        return;
    }
    double mean = 0, square = 0;
    if (layer_norm) {
        for (int i = 0; i < width; i++) mean += x[i];
        mean /= width;
    }
    for (int i = 0; i < width; i++) square += (x[i] - mean) * (x[i] - mean);
    const float inverse = (float)(1 / std::sqrt(square / width + eps)), middle = (float)mean;
    for (int i = 0; i < width; i++)
        y[i] = (x[i] - middle) * inverse * norm.weight[i] + (norm.bias == nullptr ? 0 : norm.bias[i]);
}

void rotate(float* head, const float* cos, const float* sin, int head_dim, bool interleaved) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float& a = head[interleaved ? 2 * i : i];
        float& b = head[interleaved ? 2 * i + 1 : i + half];
        const float x = a, y = b;
        a = x * cos[i] - y * sin[i];
        b = y * cos[i] + x * sin[i];
    }
}

// Row `row` of a matrix as it was before packing.
void look_up(int precision, const Matrix& matrix, int row, float* out) {
    const char* const panel = (const char*)matrix.data + row / PANEL * panel_bytes(precision, matrix.columns);
    const int lane = row % PANEL;
    for (int k = 0; k < matrix.columns; k++) {
        if (precision == FP32) {
            out[k] = ((const float*)panel)[k * PANEL + lane];
        } else if (precision == BF16) {
            out[k] = widen(((const bfloat16*)panel)[(k / 2 * PANEL + lane) * 2 + k % 2]);
        } else if (precision == INT8) {
            out[k] = (float)(((const uint8_t*)panel)[(k / 4 * PANEL + lane) * 4 + k % 4] - 128) * matrix.scale[row];
        } else {
            const char* const group = panel + k / GROUP * (2 * PANEL + GROUP / 2 * PANEL);
            const uint8_t both = ((const uint8_t*)group + 2 * PANEL)[(k % GROUP / 8 * PANEL + lane) * 4 + k % 4];
            out[k] = (float)((k % 8 < 4 ? both & 15 : both >> 4) - 8) * widen(((const bfloat16*)group)[lane]);
        }
    }
}

INLINE Floats silu(Floats x) { return x / (exponential(-x) + 1.f); }

// What one thread knows of a step.
template <Precision precision>
struct Walk {
    const Model& model;
    const Call& call;
    Workspace& space;
    Team& team;
    const int thread;
    int phase = 0;

    int width() const { return model.width; }
    int pairs_of(int row) const { return row * model.experts_per_token; }

    void meet() {
        team.meet();
        phase++;
    }

    // work(i) for every i below n, shared among the threads.
    template <class Work>
    void share(int n, Work&& work) {
        for (int i; (i = team.take(phase)) < n;) work(i);
    }

    Operand operand(int columns) const {
        const int64_t padded = padded_columns(precision, columns);
        return {space.operand.data, space.operand_scale.data, space.operand_zero.data, operand_stride(precision, columns),
                padded / GROUP};
    }

    // rows of floats -> operands, each after a norm of its own; source(row) says where a row is.
    template <class Source>
    Operand ready(int rows, int columns, const Norm& before, Source&& source) {
        const Operand to = operand(columns);
        share(rows, [&](int row) {
            const float* x = source(row);
            if (before.weight != nullptr) {
                float* const y = space.normed.data + (int64_t)row * columns;
                norm(before, model.layer_norm, model.norm_eps, x, columns, y);
                x = y;
            }
            prepare(precision, x, columns, to, row);
        });
        meet();
        return to;
    }

    // Products of rows [begin, end) of x with matrix number e, for every e below `count`; emit(row, first output,
    // outputs of 16, y). All threads share them.
    template <class Emit>
    void product(const Matrix* matrices, int count, const int32_t* begins, const Operand& x, Emit&& emit) {
        const int panels = (matrices[0].rows + PANEL - 1) / PANEL;
        int each = MOST_PANELS;  // panels a task
        while (each > 2 && (int64_t)(panels / each) * count < 4 * team.size) each /= 2;
        const int blocks = (panels + each - 1) / each;
        share(blocks * count, [&](int task) {
            const int e = task / blocks, panel = task % blocks * each;
            const int rows = begins[e + 1] - begins[e];
            if (rows == 0) return;
            const int some = panels - panel < each ? panels - panel : each;
            block<precision>(matrices[e], panel, some, x, begins[e], rows,
                             [&](int row, int panel, int panels, const float* y) { emit(e, row, panel, panels, y); });
        });
        meet();
    }

    // The usual: out(row)[i] = y[i] + bias[i], or added to what is there.
    void project(const Matrix& matrix, int rows, const Operand& x, float* out, int64_t stride, bool add) {
        const int32_t all[2] = {0, rows};
        product(&matrix, 1, all, x, [&](int, int row, int panel, int panels, const float* y) {
            const int from = panel * PANEL, to = std::min(from + panels * PANEL, matrix.rows);
            float* const own = out + row * stride;
            for (int i = from; i < to; i++) {
                const float value = y[i - from] + (matrix.bias == nullptr ? 0 : matrix.bias[i]);
                own[i] = add ? own[i] + value : value;
            }
        });
    }

    void all_of() {
        const int rows = call.rows;
        float* const x = space.x.data;
        set_tiles<precision>();
        share(rows, [&](int row) {
            float* const own = x + (int64_t)row * width();
            look_up(precision, model.embedding, call.ids[row], own);
            if (model.learned != nullptr)
                for (int i = 0; i < width(); i++) own[i] += model.learned[(int64_t)call.positions[row] * width() + i];
        });
        meet();
        for (int l = 0; l < model.layers; l++) {
            const Layer& layer = model.layer[l];
            attention(layer, l);
            after(layer.attention_norm);
            model.experts ? mixture(layer) : dense(layer);
            after(layer.mlp_norm);
        }
        const Operand last = ready(call.wanted, width(), model.final_norm,
                                   [&](int i) { return x + (int64_t)call.wanted_rows[i] * width(); });
        project(model.head, call.wanted, last, call.logits, model.vocab_size, false);
        forget_tiles<precision>();
    }

    // The norm that comes before a part, or after it.
    Norm before(const Norm& norm) const { return model.post_norm ? Norm{nullptr, nullptr} : norm; }
    void after(const Norm& own) {
        if (!model.post_norm) return;
        share(call.rows, [&](int row) {
            float* const x = space.x.data + (int64_t)row * width();
            norm(own, model.layer_norm, model.norm_eps, x, width(), x);
        });
        meet();
    }
    Operand from_x(const Norm& norm) {
        return ready(call.rows, width(), before(norm), [&](int row) { return space.x.data + (int64_t)row * width(); });
    }

    void attention(const Layer& layer, int l) {
        const Operand x = from_x(layer.attention_norm);
        const int64_t all = (model.heads + 2 * model.kv_heads) * model.head_dim;
        project(layer.qkv, call.rows, x, space.qkv.data, all, false);
        if (call.cache_bf16)
            remember_and_attend<bfloat16>(layer, l, all);
        else
            remember_and_attend<float>(layer, l, all);
        const int columns = model.heads * model.head_dim;
        const Operand attended = ready(call.rows, columns, Norm{nullptr, nullptr},
                                       [&](int row) { return space.attended.data + (int64_t)row * columns; });
        project(layer.o, call.rows, attended, space.x.data, width(), model.residual);
    }

    template <class T>
    void remember_and_attend(const Layer& layer, int l, int64_t all) {
        const int heads = model.heads, kv_heads = model.kv_heads, head_dim = model.head_dim, group = heads / kv_heads;
        const int64_t stride = (int64_t)kv_heads * head_dim;
        T *const keys = (T*)call.keys[l], *const values = (T*)call.values[l];
        share(call.rows, [&](int row) {
            float* const own = space.qkv.data + row * all;
            for (int h = 0; h < heads + kv_heads; h++) {
                float* const head = own + h * head_dim;
                const Norm& of = h < heads ? layer.q_norm : layer.k_norm;
                norm(of, model.layer_norm, model.norm_eps, head, head_dim, head);
                if (call.cos != nullptr) {
                    const int64_t at = (int64_t)row * (head_dim / 2);
                    rotate(head, call.cos + at, call.sin + at, head_dim, model.interleaved);
                }
            }
            const int64_t at = (call.slots[row] * call.capacity + call.positions[row] % call.capacity) * stride;
            const float* const k = own + heads * head_dim;
            for (int i = 0; i < stride; i++) narrow(k[i], keys[at + i]), narrow(k[stride + i], values[at + i]);
        });
        meet();
        AttendRoom& room = space.rooms[thread];
        const float scale = 1 / std::sqrt((float)head_dim);
        const int64_t padded = (head_dim + LANES - 1) / LANES * LANES;
        share((int)space.turns.size() * kv_heads, [&](int task) {
            // The last ones of a prompt see most: they come first.
            const Turn& turn = space.turns[space.turns.size() - 1 - task / kv_heads];
            const int kv_head = task % kv_heads, count = turn.count * group;
            float** const out = room.out.data();
            for (int i = 0; i < turn.count; i++)
                for (int g = 0; g < group; g++) {
                    const int q = i * group + g, h = kv_head * group + g, row = turn.row + i;
                    const float* const from = space.qkv.data + row * all + h * head_dim;
                    for (int d = 0; d < head_dim; d++) room.queries[q * padded + d] = from[d] * scale;
                    const int64_t position = call.positions[row], first = position - model.window + 1;
                    room.of[q] = {position, model.window > 0 && first > 0 ? first : 0};
                    out[q] = space.attended.data + ((int64_t)row * heads + h) * head_dim;
                }
            const int64_t begin = call.slots[turn.row] * call.capacity * stride + kv_head * head_dim;
            attend<T>({keys + begin, stride, call.capacity}, {values + begin, stride, call.capacity}, room, count, head_dim,
                      out);
        });
        meet();
    }

    // h[row][i] = act(gate_i) · up_i, or act(up_i), for the outputs of the first product of an MLP.
    void think(const Matrix& matrix, float* out, int panel, int panels, const float* y) {
        if (model.mlp == 0) {
            for (int p = 0; p < panels; p += 2) {
                const int from = (panel + p) / 2 * PANEL, count = std::min(PANEL, model.d_ff - from);
                const float* const bias = matrix.bias == nullptr ? nullptr : matrix.bias + (panel + p) * PANEL;
                for (int i = 0; i < PANEL; i += LANES) {
                    Floats gate = load<Floats>(y + p * PANEL + i), up = load<Floats>(y + (p + 1) * PANEL + i);
                    if (bias != nullptr) gate += load<Floats>(bias + i), up += load<Floats>(bias + PANEL + i);
                    if (i < count) store_part(out + from + i, silu(gate) * up, count - i);
                }
            }
            return;
        }
        const int from = panel * PANEL, to = std::min(from + panels * PANEL, model.d_ff);
        for (int i = from; i < to; i++) {
            const float v = y[i - from] + (matrix.bias == nullptr ? 0 : matrix.bias[i]);
            out[i] = model.mlp == 1 ? v * 0.5f * (1 + std::erf(v * 0.70710678f)) : v < 0 ? 0 : v;
        }
    }

    void dense(const Layer& layer) {
        const Operand x = from_x(layer.mlp_norm);
        const int32_t all[2] = {0, call.rows};
        float* const hidden = space.hidden.data;
        product(layer.up, 1, all, x, [&](int, int row, int panel, int panels, const float* y) {
            think(layer.up[0], hidden + (int64_t)row * model.d_ff, panel, panels, y);
        });
        const Operand h = ready(call.rows, model.d_ff, Norm{nullptr, nullptr},
                                [&](int row) { return hidden + (int64_t)row * model.d_ff; });
        project(layer.down[0], call.rows, h, space.x.data, width(), model.residual);
    }

    // Every row visits k experts: a pair is one visit, and pairs are sorted by expert.
    void mixture(const Layer& layer) {
        const int k = model.experts_per_token, experts = model.experts, rows = call.rows, pairs = rows * k;
        int32_t *const expert = space.expert.data, *const place = space.pairs.data, *const begins = space.begins.data;
        float *const weight = space.expert_weight.data, *const normed = space.normed.data;
        const Norm own = before(layer.mlp_norm);
        share(rows, [&](int row) {
            float* const h = normed + (int64_t)row * width();
            norm(own, model.layer_norm, model.norm_eps, space.x.data + (int64_t)row * width(), width(), h);
            choose(layer.router, h, expert + row * k, weight + row * k);
        });
        meet();
        if (thread == 0) {
            for (int e = 0; e <= experts; e++) begins[e] = 0;
            for (int p = 0; p < pairs; p++) begins[expert[p] + 1]++;
            for (int e = 0; e < experts; e++) begins[e + 1] += begins[e];
            for (int e = experts, at = pairs; e-- > 0;)  // from behind, as begins is read
                for (int p = pairs; p-- > 0;)
                    if (expert[p] == e) place[--at] = p;
        }
        meet();
        const Operand x = ready(pairs, width(), Norm{nullptr, nullptr},
                                [&](int i) { return normed + (int64_t)(place[i] / k) * width(); });
        float *const hidden = space.hidden.data, *const answers = space.answers.data;
        product(layer.up, experts, begins, x, [&](int e, int row, int panel, int panels, const float* y) {
            think(layer.up[e], hidden + (int64_t)row * model.d_ff, panel, panels, y);
        });
        const Operand h = ready(pairs, model.d_ff, Norm{nullptr, nullptr},
                                [&](int i) { return hidden + (int64_t)i * model.d_ff; });
        product(layer.down, experts, begins, h, [&](int e, int row, int panel, int panels, const float* y) {
            const Matrix& matrix = layer.down[e];
            const int from = panel * PANEL, to = std::min(from + panels * PANEL, matrix.rows);
            float* const out = answers + (int64_t)place[row] * width();
            for (int i = from; i < to; i++) out[i] = y[i - from] + (matrix.bias == nullptr ? 0 : matrix.bias[i]);
        });
        share(rows, [&](int row) {
            float* const out = space.x.data + (int64_t)row * width();
            for (int i = 0; i < width(); i++) {
                float total = model.residual ? out[i] : 0;
                for (int j = 0; j < k; j++)
                    total += weight[row * k + j] * answers[((int64_t)row * k + j) * width() + i];
                out[i] = total;
            }
        });
        meet();
    }

    // The k experts that the router thinks most probable, and their weights. Of two alike the first one.
    void choose(const float* router, const float* h, int32_t* chosen, float* weight) {
        const int experts = model.experts, k = model.experts_per_token;
        std::vector<float> probable(experts);
        float most = -INFINITY, total = 0;
        for (int e = 0; e < experts; e++) {
            float score = 0;
            for (int i = 0; i < width(); i++) score += h[i] * router[(int64_t)e * width() + i];
            probable[e] = score;
            most = score > most ? score : most;
        }
        for (float& each : probable) total += each = std::exp(each - most);
        for (float& each : probable) each /= total;
        float sum = 0;
        for (int j = 0; j < k; j++) {
            int best = -1;
            for (int e = 0; e < experts; e++) {
                bool is_taken = false;
                for (int i = 0; i < j; i++) is_taken |= chosen[i] == e;
                if (!is_taken && (best < 0 || probable[e] > probable[best])) best = e;
            }
            chosen[j] = best, weight[j] = probable[best];
            sum += probable[best];
        }
        if (model.renormalize)
            for (int j = 0; j < k; j++) weight[j] /= sum;
    }
};

void fit(const Model& model, const Call& call, Workspace& space, int threads) {
    const size_t rows = call.rows, k = model.experts ? model.experts_per_token : 1;
    const size_t visits = (std::max(rows * k, (size_t)call.wanted) + 31) / 32 * 32;  // tiles read whole
    const size_t attended = (size_t)model.heads * model.head_dim;
    const int widest = std::max({model.width, (int)attended, model.d_ff});
    space.x.fit(rows * model.width);
    space.normed.fit(visits * model.width);
    space.qkv.fit(rows * (model.heads + 2 * model.kv_heads) * model.head_dim);
    space.attended.fit(rows * attended);
    space.hidden.fit(visits * model.d_ff);
    space.operand.fit(visits * operand_stride(model.precision, widest));
    space.operand_scale.fit(visits * (widest / GROUP + 1));
    space.operand_zero.fit(visits * (widest / GROUP + 1));
    if (model.experts) {
        space.answers.fit(visits * model.width);
        space.expert.fit(visits), space.pairs.fit(visits), space.expert_weight.fit(visits);
        space.begins.fit(model.experts + 1);
    }
    space.turns.clear();
    for (int row = 0; row < call.rows;) {
        int count = 1;
        while (row + count < call.rows && count < LARGEST_TURN && call.slots[row + count] == call.slots[row]) count++;
        space.turns.push_back({row, count});
        row += count;
    }
    if ((int)space.rooms.size() < threads) space.rooms.resize(threads);
    for (AttendRoom& room : space.rooms) room.fit(LARGEST_TURN * (model.heads / model.kv_heads), model.head_dim);
}

template <Precision precision>
void run(const Model& model, const Call& call, Workspace& space, int threads) {
    const int phases = 16 * model.layers + 8;
    Pool::of_process().run(threads, phases, [&](Team& team, int thread) {
        Walk<precision>{model, call, space, team, thread}.all_of();
    });
}

}  // namespace

extern "C" {

Workspace* make_workspace(void) { return new (std::nothrow) Workspace; }

void free_workspace(Workspace* space) { delete space; }

int step(const Model* model, const Call* call, Workspace* space, int32_t threads) {
    threads = std::max(1, std::min(threads, MOST_THREADS - 1));
    try {
        fit(*model, *call, *space, threads);
        switch (model->precision) {
            case FP32: run<FP32>(*model, *call, *space, threads); break;
            case BF16: run<BF16>(*model, *call, *space, threads); break;
            case INT8: run<INT8>(*model, *call, *space, threads); break;
            default: run<INT4>(*model, *call, *space, threads);
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

int can_run(void) {
#if defined(__AMX_BF16__)
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
    unsigned a, b, c, d;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    constexpr int ask_for_tiles = 0x1023, tile_data = 18;  // arch_prctl's, in Linux from 5.16 on
    return (d >> 22 & 1) && (d >> 24 & 1) && syscall(SYS_arch_prctl, ask_for_tiles, tile_data) == 0;
#elif defined(__AVX512BF16__)
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

#if !defined(SOURCE_DIGEST)
#define SOURCE_DIGEST ""
#endif
const char* source_digest(void) { return SOURCE_DIGEST; }

int64_t packed_bytes(int32_t precision, int32_t rows, int32_t columns) {
    return (rows + PANEL - 1) / PANEL * panel_bytes(precision, columns);
}
}

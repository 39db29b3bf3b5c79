// Dense layers on a few samples: products of a few rows with a large matrix, and SGD steps on it, each in one pass.
//
// All tensors are float32 and contiguous; K clients with B samples each have x [K, B, I], w [K, O, I],
// y and g [K, B, O]. A matrix of megabytes does not stay in the cache from one step to the next, so reading it from
// memory takes most of a layer's time.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace {

// Columns of w per block: the columns of all samples fit into the first-level cache.
int block_of(int B) { return std::max(10240 / B / LANES, 4) * LANES; }

// Rows of w in a tile: five rows of sums, the rows' numbers and one factor fit into the registers.
constexpr int TALL = REGISTERS >= 32 ? 4 : 2;

// Numbers of a row that are prefetched: rows are far apart in memory, so the processor does not predict the next.
constexpr int AHEAD = 256;

// Copy columns [first, first + some) of rows with stride `apart` to rows with stride `pitch`, zeros up to a vector.
void gather(int B, const float* x, int64_t apart, int some, int pitch, float* out) {
    for (int b = 0; b < B; b++, x += apart, out += pitch) {
        copy_row(out, x, some);
        for (int i = some; i < pitch; i++) out[i] = 0;
    }
}

inline Vector load_some(const float* p, int n) {
    float copy[LANES] = {};
    copy_row(copy, p, n);
    return load(copy);
}

// Products of N samples' rows with M rows of w, added to y.
template <int N, int M>
void dots(const float* x, int pitch, const float* w, int64_t I, int some, float* y, int O) {
    Vector sum[N][M] = {};
    for (int i = 0; i < some; i += LANES) {
        Vector weight[M];
        for (int m = 0; m < M; m++) {
            __builtin_prefetch(w + m * I + i + AHEAD);
            weight[m] = some - i >= LANES ? load(w + m * I + i) : load_some(w + m * I + i, some - i);
        }
        for (int n = 0; n < N; n++) {
            const Vector value = load(x + n * pitch + i);
            for (int m = 0; m < M; m++) sum[n][m] += value * weight[m];
        }
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++) y[n * O + m] += total(sum[n][m]);
}

template <int N>
void dots_of(const float* x, int pitch, const float* w, int64_t I, int some, float* y, int O) {
    int o = 0;
    for (; o + TALL <= O; o += TALL) dots<N, TALL>(x, pitch, w + o * I, I, some, y + o, O);
    for (; o < O; o++) dots<N, 1>(x, pitch, w + o * I, I, some, y + o, O);
}

// Add multiples of N samples' rows x to M rows of w, with one factor for each pair.
template <int N, int M>
void add_products(float factor, const float* g, int O, const float* x, int pitch, float* w, int64_t I, int some) {
    float scaled[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) scaled[m][n] = factor * g[n * O + m];
    for (int i = 0; i < some; i += LANES) {
        Vector sum[M];
        for (int m = 0; m < M; m++) {
            __builtin_prefetch(w + m * I + i + AHEAD);
            sum[m] = some - i >= LANES ? load(w + m * I + i) : load_some(w + m * I + i, some - i);
        }
        for (int n = 0; n < N; n++) {
            const Vector value = load(x + n * pitch + i);
            for (int m = 0; m < M; m++) sum[m] += scaled[m][n] * value;
        }
        for (int m = 0; m < M; m++)
            if (some - i >= LANES)
                store(w + m * I + i, sum[m]);
            else
                copy_row(w + m * I + i, reinterpret_cast<const float*>(&sum[m]), some - i);
    }
}

template <int N>
void add_products_of(float factor, const float* g, int O, const float* x, int pitch, float* w, int64_t I, int some) {
    int o = 0;
    for (; o + 2 <= O; o += 2) add_products<N, 2>(factor, g + o, O, x, pitch, w + o * I, I, some);
    for (; o < O; o++) add_products<N, 1>(factor, g + o, O, x, pitch, w + o * I, I, some);
}

// Columns of the result per block: the columns of all samples fit into the second-level cache.
constexpr int MADE = 480;

// Rows of a tile of three vectors of columns.
constexpr int MADE_ROWS = REGISTERS >= 32 ? 8 : 4;

// M rows and V vectors of columns of w = from + g^T x.
template <int M, int V>
void make_tile(int B, const float* g, int O, const float* x, int pitch, const float* from, float* w, int64_t I) {
    Vector sum[M][V];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) sum[m][v] = load(from + m * I + v * LANES);
    for (int b = 0; b < B; b++, g += O, x += pitch) {
        Vector value[V];
        for (int v = 0; v < V; v++) value[v] = load(x + v * LANES);
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) sum[m][v] += g[m] * value[v];
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) store(w + m * I + v * LANES, sum[m][v]);
}

template <int M>
void make_rows(int B, const float* g, int O, const float* x, int pitch, const float* from, float* w, int64_t I,
               int some) {
    int i = 0;
    for (; i + 3 * LANES <= some; i += 3 * LANES) make_tile<M, 3>(B, g, O, x + i, pitch, from + i, w + i, I);
    for (; i + LANES <= some; i += LANES) make_tile<M, 1>(B, g, O, x + i, pitch, from + i, w + i, I);
    for (; i < some; i++)
        for (int m = 0; m < M; m++) {
            float sum = from[m * I + i];
            for (int b = 0; b < B; b++) sum += g[b * O + m] * x[b * pitch + i];
            w[m * I + i] = sum;
        }
}

}  // namespace

extern "C" {

// y = x w^T.
void dense(int K, int B, int I, int O, const float* x, const float* w, float* y) {
    const int block = block_of(B);
    std::vector<float> rows(B * (block + LANES));
    std::fill(y, y + int64_t(K) * B * O, 0.0f);
    for (int k = 0; k < K; k++, x += int64_t(B) * I, w += int64_t(O) * I, y += int64_t(B) * O)
        for (int first = 0; first < I; first += block) {
            const int some = std::min(block, I - first), pitch = block + LANES;
            gather(B, x + first, I, some, pitch, rows.data());
            int b = 0;
            for (; b + 5 <= B; b += 5) dots_of<5>(&rows[b * pitch], pitch, w + first, I, some, y + int64_t(b) * O, O);
            for (; b + 2 <= B; b += 2) dots_of<2>(&rows[b * pitch], pitch, w + first, I, some, y + int64_t(b) * O, O);
            for (; b < B; b++) dots_of<1>(&rows[b * pitch], pitch, w + first, I, some, y + int64_t(b) * O, O);
        }
}

// w += factor g^T x.
void dense_update(int K, int B, int I, int O, float factor, const float* g, const float* x, float* w) {
    const int block = block_of(B);
    std::vector<float> rows(B * (block + LANES));
    for (int k = 0; k < K; k++, x += int64_t(B) * I, w += int64_t(O) * I, g += int64_t(B) * O)
        for (int first = 0; first < I; first += block) {
            const int some = std::min(block, I - first), pitch = block + LANES;
            gather(B, x + first, I, some, pitch, rows.data());
            const auto add = [&](int b, auto work) {
                work(factor, g + int64_t(b) * O, O, &rows[b * pitch], pitch, w + first, I, some);
            };
            int b = 0;
            for (; b + 10 <= B; b += 10) add(b, add_products_of<10>);
            for (; b + 4 <= B; b += 4) add(b, add_products_of<4>);
            for (; b < B; b++) add(b, add_products_of<1>);
        }
}

// w = from + g^T x for one `from` [O, I]; a client's g [B, O] and x [B, I] are the first B of `room` rows.
void dense_make(int K, int B, int I, int O, int room, const float* g, const float* x, const float* from, float* w) {
    std::vector<float> rows(int64_t(B) * MADE);
    for (int first = 0; first < I; first += MADE)
        for (int k = 0; k < K; k++) {
            const int some = std::min(MADE, I - first);
            const float* factors = g + int64_t(k) * room * O;
            float* made = w + int64_t(k) * O * I + first;
            gather(B, x + int64_t(k) * room * I + first, I, some, MADE, rows.data());
            int o = 0;
            for (; o + MADE_ROWS <= O; o += MADE_ROWS)
                make_rows<MADE_ROWS>(B, factors + o, O, rows.data(), MADE, from + o * int64_t(I) + first,
                                     made + o * int64_t(I), I, some);
            for (; o < O; o++)
                make_rows<1>(B, factors + o, O, rows.data(), MADE, from + o * int64_t(I) + first, made + o * int64_t(I), I,
                             some);
        }
}

}  // extern "C"

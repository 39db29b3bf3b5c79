// What aggregators do with the uploads of K clients, a few hundred parameters at a time.
//
// All tensors are float32 and contiguous; `rows` points at the same n parameters of each of the K uploads. Blocks of
// them are copied side by side into a scratch that fits a core's own caches, since K streams of memory at once are
// more than it can follow.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr size_t LINE = 64;
typedef float Vector __attribute__((vector_size(4 * LANES), may_alias));

// K rows of `width` floats, aligned to cache lines.
class Scratch {
  public:
    Scratch(int K, int width) : width(width), room(static_cast<size_t>(K) * width + LINE) {
        start = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.data()) + LINE - 1) & ~(LINE - 1));
    }
    float* row(int k) { return start + static_cast<size_t>(k) * width; }
    Vector* vectors(int k) { return reinterpret_cast<Vector*>(row(k)); }
    void load(int k, const float* from, int count) {
        std::memcpy(row(k), from, 4 * count);
        std::fill(row(k) + count, row(k) + width, 0.0f);
    }

  private:
    int width;
    std::vector<float> room;
    float* start;
};

}  // namespace

extern "C" {

// total += weight * row
void add_weighted(int64_t n, double weight, const float* row, double* total) {
    for (int64_t i = 0; i < n; i++) total[i] += weight * static_cast<double>(row[i]);
}

// The mean of the order statistics [low, high) of each parameter. The comparators `pairs` put rows in order as far
// as that asks for; each works on a whole block, so that it is a minimum and a maximum of a few vectors.
void mean_of_order(int64_t n, int K, const float* const* rows, int64_t comparators, const int32_t* pairs, int low,
                   int high, float* out) {
    constexpr int WIDTH = 128;
    Scratch scratch(K, WIDTH);
    for (int64_t first = 0; first < n; first += WIDTH) {
        const int count = static_cast<int>(std::min<int64_t>(WIDTH, n - first));
        for (int k = 0; k < K; k++) scratch.load(k, rows[k] + first, count);
        for (int64_t p = 0; p < comparators; p++) {
            Vector *lower = scratch.vectors(pairs[2 * p]), *upper = scratch.vectors(pairs[2 * p + 1]);
            for (int v = 0; v < WIDTH / LANES; v++) {
                const Vector a = lower[v], b = upper[v];
                lower[v] = a < b ? a : b;
                upper[v] = a < b ? b : a;
            }
        }
        double sum[WIDTH] = {};
        for (int k = low; k < high; k++)
            for (int i = 0; i < WIDTH; i++) sum[i] += scratch.row(k)[i];
        for (int i = 0; i < count; i++) out[first + i] = static_cast<float>(sum[i] / (high - low));
    }
}

// out[i, j] += sum of (row_i - row_j)^2 for j < i; float32 within a lane of a block, float64 over lanes and blocks.
void squared_distances(int64_t n, int K, const float* const* rows, int width, double* out) {
    constexpr int ROWS = 5, COLUMNS = 4;
    Scratch scratch(K + ROWS, width);
    for (int64_t first = 0; first < n; first += width) {
        const int count = static_cast<int>(std::min<int64_t>(width, n - first));
        for (int k = 0; k < K; k++) scratch.load(k, rows[k] + first, count);
        for (int i = 0; i < K; i += ROWS)
            for (int j = 0; j < std::min(i + ROWS, K); j += COLUMNS) {
                Vector sum[ROWS][COLUMNS] = {};
                for (int v = 0; v < width / LANES; v++) {
                    Vector row[ROWS];
                    for (int r = 0; r < ROWS; r++) row[r] = scratch.vectors(i + r)[v];
                    for (int c = 0; c < COLUMNS; c++) {
                        const Vector other = scratch.vectors(j + c)[v];
                        for (int r = 0; r < ROWS; r++) {
                            const Vector difference = row[r] - other;
                            sum[r][c] += difference * difference;
                        }
                    }
                }
                for (int r = 0; r < ROWS && i + r < K; r++)
                    for (int c = 0; c < COLUMNS && j + c < i + r; c++) {
                        double all = 0;
                        for (int l = 0; l < LANES; l++) all += sum[r][c][l];
                        out[static_cast<int64_t>(i + r) * K + j + c] += all;
                    }
            }
    }
}

// origin + the weighted mean of those row - origin that lie within [low, high]; origin where none does.
void mean_within(int64_t n, int K, const float* const* rows, const double* weights, const float* origin, double low,
                 double high, float* out) {
    constexpr int WIDTH = 256;
    for (int64_t first = 0; first < n; first += WIDTH) {
        const int count = static_cast<int>(std::min<int64_t>(WIDTH, n - first));
        double start[WIDTH], sum[WIDTH] = {}, weight[WIDTH] = {};
        std::copy_n(origin + first, count, start);
        for (int k = 0; k < K; k++) {
            const float* row = rows[k] + first;
            const double share = weights[k];
            for (int i = 0; i < count; i++) {
                const double update = row[i] - start[i];
                const double counted = (update >= low) & (update <= high) ? share : 0.0;
                sum[i] += counted * update;
                weight[i] += counted;
            }
        }
        for (int i = 0; i < count; i++)
            out[first + i] = static_cast<float>(start[i] + (weight[i] > 0 ? sum[i] / weight[i] : 0.0));
    }
}

}  // extern "C"

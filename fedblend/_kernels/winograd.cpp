// The transforms of Winograd's convolutions F(2x2, 3x3) of one client: kernels of 3x3, stride 1, padding p <= 2.
//
// Four outputs of a tile take 16 products for each pair of channels in place of 36 (Lavin and Gray, 2016). With
//
//     V = B^T d B of a tile's 4x4 inputs d,    U = G w G^T of a kernel w,    y = A^T (sum over channels of U V) A
//
// the sums over channels are 16 products of matrices, which the caller computes. All tensors are float32 and
// contiguous: x [B, C, H, W], w [O, C, 3, 3], y and g [B, O, h, w], and by number of the product U [16, O, C],
// V [16, C, P] and M [16, O, P] for all tiles P of the B samples.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pools.h"

namespace {

// Numbers from one product's matrix to the next. A cache line more than its size: sixteen matrices at a distance of a
// power of two share one set of the first-level cache.
inline int64_t apart(int64_t size) { return size + 16; }

inline int up(int n, int to) { return (n + to - 1) / to * to; }

struct Geometry {
    int H, W, p;
    int h() const { return H + 2 * p - 2; }
    int w() const { return W + 2 * p - 2; }
    // Rows and columns of tiles. The last ones reach beyond the outputs where these are odd.
    int high() const { return (h() + 1) / 2; }
    int wide() const { return (w() + 1) / 2; }
    int tiles() const { return high() * wide(); }
    // Rows of every second number, with room for reads beyond their end.
    int pitch() const { return up(wide(), LANES) + LANES; }
};

// A row's numbers 0, 2, 4, ... and 1, 3, 5, ...; reads and writes whole vectors.
inline void deinterleave(const float* row, int n, float* even, float* odd) {
    for (int j = 0; j < n; j += LANES) {
        const Vector a = load(row + 2 * j), b = load(row + 2 * j + LANES);
        store(even + j, shuffle(a, b, EVEN)), store(odd + j, shuffle(a, b, ODD));
    }
}

// The 16 numbers of a run of tiles, one in each product's matrix. `left` counts the tiles of the run, `room` the numbers
// of a matrix from the first tile on. Numbers beyond the run are overwritten by the next run.
inline void store_products(const Vector (&v)[4][4], float* to, int64_t apart, int left, int64_t room) {
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) store_run(to + (4 * a + b) * apart, v[a][b], left, room);
}

inline Vector load_run(const float* from, int left, int64_t room) {
    if (room >= LANES) return load(from);
    float copy[LANES] = {};
    copy_row(copy, from, left);
    return load(copy);
}

// B^T d B of a matrix d of vectors.
inline void input_products(const Vector (&d)[4][4], Vector (&v)[4][4]) {
    for (int a = 0; a < 4; a++) {
        Vector t[4];
        for (int b = 0; b < 4; b++)
            t[b] = a == 0 ? d[0][b] - d[2][b] : a == 1 ? d[1][b] + d[2][b] : a == 2 ? d[2][b] - d[1][b] : d[1][b] - d[3][b];
        v[a][0] = t[0] - t[2], v[a][1] = t[1] + t[2], v[a][2] = t[2] - t[1], v[a][3] = t[1] - t[3];
    }
}

// Call `work(c, left, room, place)` on runs of channels of one of `rows` kernels: `place` is that in a matrix of
// products.
template <class Work>
void each_run_of_kernels(int rows, int C, Work work) {
    for (int64_t o = 0; o < rows; o++)
        for (int c = 0; c < C; c += LANES) work(o * C + c, std::min(LANES, C - c), rows * int64_t(C) - (o * C + c));
}

}  // namespace

extern "C" {

void winograd_input(int B, int C, int H, int W, int p, const float* x, float* V) {
    const Geometry s{H, W, p};
    const int pitch = s.pitch(), plane = (s.high() + 1) * pitch;
    const int64_t P = int64_t(B) * s.tiles();
    // Number (a, b) of a tile (i, j) is in the image of rows a, a + 2, ... and columns b, b + 2, ...
    std::vector<float> row(4 * pitch + W), images(4 * plane + LANES);
    for (int c = 0; c < C; c++)
        for (int b = 0; b < B; b++) {
            const float* image = x + (int64_t(b) * C + c) * H * W;
            for (int i = 0; i < 2 * s.high() + 2; i++) {
                float* even = &images[i % 2 * 2 * plane + i / 2 * pitch];
                if (i < p || i >= p + H) {
                    std::fill(even, even + pitch, 0.0f), std::fill(even + plane, even + plane + pitch, 0.0f);
                    continue;
                }
                copy_row(&row[p], image + (i - p) * W, W);
                deinterleave(row.data(), pitch, even, even + plane);
            }
            int64_t place = c * P + int64_t(b) * s.tiles();
            for (int i = 0; i < s.high(); i++)
                for (int j = 0; j < s.wide(); j += LANES) {
                    Vector d[4][4], v[4][4];
                    for (int a = 0; a < 4; a++)
                        for (int e = 0; e < 4; e++)
                            d[a][e] = load(&images[(a % 2 * 2 + e % 2) * plane + (i + a / 2) * pitch + j + e / 2]);
                    input_products(d, v);
                    const int left = std::min(LANES, s.wide() - j);
                    store_products(v, V + place, apart(C * P), left, C * P - place);
                    place += left;
                }
        }
}

// A g A^T of the tiles of gradients.
void winograd_gradient(int B, int O, int H, int W, int p, const float* g, float* M) {
    const Geometry s{H, W, p};
    const int h = s.h(), w = s.w(), pitch = s.pitch();
    const int64_t P = int64_t(B) * s.tiles();
    std::vector<float> row(2 * pitch + w), rows(4 * pitch);
    for (int o = 0; o < O; o++)
        for (int b = 0; b < B; b++) {
            const float* image = g + (int64_t(b) * O + o) * h * w;
            int64_t place = o * P + int64_t(b) * s.tiles();
            for (int i = 0; i < h; i += 2) {
                for (int second = 0; second < 2; second++) {
                    if (i + second < h)
                        copy_row(row.data(), image + (i + second) * w, w);
                    else
                        std::fill(row.begin(), row.end(), 0.0f);
                    deinterleave(row.data(), pitch, &rows[2 * second * pitch], &rows[(2 * second + 1) * pitch]);
                }
                for (int j = 0; j < s.wide(); j += LANES) {
                    Vector v[4][4];
                    for (int a = 0; a < 4; a++) {
                        Vector t[2];
                        for (int e = 0; e < 2; e++) {
                            const Vector top = load(&rows[e * pitch + j]), bottom = load(&rows[(2 + e) * pitch + j]);
                            t[e] = a == 0 ? top : a == 1 ? top + bottom : a == 2 ? top - bottom : -bottom;
                        }
                        v[a][0] = t[0], v[a][1] = t[0] + t[1], v[a][2] = t[0] - t[1], v[a][3] = -t[1];
                    }
                    const int left = std::min(LANES, s.wide() - j);
                    store_products(v, M + place, apart(O * P), left, O * P - place);
                    place += left;
                }
            }
        }
}

// y = A^T M A.
void winograd_output(int B, int O, int H, int W, int p, const float* M, float* y) {
    const Geometry s{H, W, p};
    const int h = s.h(), w = s.w();
    const int64_t P = int64_t(B) * s.tiles();
    std::vector<float> rows(4 * s.pitch());
    for (int o = 0; o < O; o++)
        for (int b = 0; b < B; b++) {
            float* image = y + (int64_t(b) * O + o) * h * w;
            int64_t place = o * P + int64_t(b) * s.tiles();
            for (int i = 0; i < h; i += 2) {
                for (int j = 0; j < s.wide(); j += LANES) {
                    const int left = std::min(LANES, s.wide() - j);
                    Vector t[2][4];
                    for (int e = 0; e < 4; e++) {
                        Vector m[4];
                        for (int a = 0; a < 4; a++)
                            m[a] = load_run(M + (4 * a + e) * apart(O * P) + place, left, O * P - place);
                        t[0][e] = m[0] + m[1] + m[2], t[1][e] = m[1] - m[2] - m[3];
                    }
                    for (int second = 0; second < 2; second++) {
                        const Vector(&u)[4] = t[second];
                        const Vector even = u[0] + u[1] + u[2], odd = u[1] - u[2] - u[3];
                        float* to = &rows[2 * second * s.pitch() + 2 * j];
                        store(to, shuffle(even, odd, LOW)), store(to + LANES, shuffle(even, odd, HIGH));
                    }
                    place += left;
                }
                copy_row(image + i * w, rows.data(), w);
                if (i + 1 < h) copy_row(image + (i + 1) * w, &rows[2 * s.pitch()], w);
            }
        }
}

// U = G w G^T; `rotated` by half a turn, for the convolution that is the derivative by the input.
void winograd_weight(int O, int C, int rotated, const float* w, float* U) {
    each_run_of_kernels(O, C, [&](int64_t place, int left, int64_t room) {
        float taps[9][LANES] = {};
        for (int c = 0; c < left; c++)
            for (int tap = 0; tap < 9; tap++) taps[rotated ? 8 - tap : tap][c] = w[(place + c) * 9 + tap];
        Vector t[4][3], u[4][4];
        for (int b = 0; b < 3; b++) {
            const Vector first = load(taps[b]), second = load(taps[3 + b]), third = load(taps[6 + b]);
            t[0][b] = first, t[1][b] = 0.5f * (first + second + third);
            t[2][b] = 0.5f * (first - second + third), t[3][b] = third;
        }
        for (int a = 0; a < 4; a++) {
            u[a][0] = t[a][0], u[a][1] = 0.5f * (t[a][0] + t[a][1] + t[a][2]);
            u[a][2] = 0.5f * (t[a][0] - t[a][1] + t[a][2]), u[a][3] = t[a][2];
        }
        store_products(u, U + place, apart(int64_t(O) * C), left, room);
    });
}

// w = G^T U G.
void winograd_weight_gradient(int O, int C, const float* U, float* w) {
    each_run_of_kernels(O, C, [&](int64_t place, int left, int64_t room) {
        Vector t[3][4];
        for (int b = 0; b < 4; b++) {
            Vector u[4];
            for (int a = 0; a < 4; a++) u[a] = load_run(U + (4 * a + b) * apart(int64_t(O) * C) + place, left, room);
            t[0][b] = u[0] + 0.5f * (u[1] + u[2]), t[1][b] = 0.5f * (u[1] - u[2]), t[2][b] = 0.5f * (u[1] + u[2]) + u[3];
        }
        float taps[9][LANES];
        for (int a = 0; a < 3; a++) {
            const Vector middle = 0.5f * (t[a][1] + t[a][2]);
            store(taps[3 * a], t[a][0] + middle), store(taps[3 * a + 1], 0.5f * (t[a][1] - t[a][2]));
            store(taps[3 * a + 2], middle + t[a][3]);
        }
        for (int c = 0; c < left; c++)
            for (int tap = 0; tap < 9; tap++) w[(place + c) * 9 + tap] = taps[tap][c];
    });
}

}  // extern "C"

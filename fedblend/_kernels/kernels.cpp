// Convolutions and max pools of many clients together; every client has its own weights.
//
// All tensors are float32 and contiguous; K clients with B samples each have x [K, B, C, H, W],
// w [K, O, C, kh, kw], y [K, B, O, h, w]; the stride is 1 and p is the padding, so h = H + 2p - kh + 1.
//
// Each sample is copied once into a padded scratch image with rows of W + 2p. In the flat image, output q is
// y[o, q] = sum_{c, i, j} w[o, c, i, j] x[c, q + i (W + 2p) + j],  so every load is contiguous for any width of the
// image. The last kw - 1 columns of each row are computed, but not used.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pools.h"
#include "vectors.h"

namespace {

// Floats of images and gradients per block, which fit into the second-level cache.
constexpr int READ_AT_ONCE = 1 << 16;

// Vectors of positions in a tile: six rows of sums, the positions' numbers and one factor fit into the registers.
constexpr int WIDE = REGISTERS >= 32 ? 4 : 2;

// Rows of a tile of T columns whose sums, with T numbers and one factor, fit into the registers.
constexpr int rows_beside(int T) { return (REGISTERS - 1 - T) / T >= 4 ? 4 : 2; }

inline int up(int n, int to) { return (n + to - 1) / to * to; }

struct Shape {
    int C, H, W, O, kh, kw, p;
    int width() const { return W + 2 * p; }
    int height() const { return H + 2 * p; }
    int h() const { return height() - kh + 1; }
    int w() const { return width() - kw + 1; }
    int taps() const { return kh * kw; }
    // Flat outputs, and the size of a plane of the scratch image with room for reads beyond its end.
    int flat() const { return h() * width(); }
    int plane() const { return up(flat(), 4 * LANES) + (kh - 1) * width() + kw + LANES; }
    int gradient_plane() const { return up(flat(), 4 * LANES); }
};

// One sample's channels with a border of p zeros.
void pad_image(const Shape& s, const float* x, float* out) {
    for (int c = 0; c < s.C; c++, out += s.plane(), x += s.H * s.W)
        for (int i = 0; i < s.H; i++) copy_row(out + (i + s.p) * s.width() + s.p, x + i * s.W, s.W);
}

void crop_image(const Shape& s, const float* padded, float* x) {
    for (int c = 0; c < s.C; c++, padded += s.plane(), x += s.H * s.W)
        for (int i = 0; i < s.H; i++) copy_row(x + i * s.W, padded + (i + s.p) * s.width() + s.p, s.W);
}

// One sample's outputs in rows of the padded image's width, with zeros between the rows.
void widen(const Shape& s, const float* g, float* out) {
    for (int o = 0; o < s.O; o++, out += s.gradient_plane())
        for (int i = 0; i < s.h(); i++, g += s.w()) copy_row(out + i * s.width(), g, s.w());
}

// The gradients of outputs, sample by sample; with `which`, the gradients of the outputs' max pool.
struct Gradients {
    const Shape& s;
    const float* g;
    const uint8_t* which;
    void next(float* out) {
        const int64_t plane = s.gradient_plane();
        const Planes planes{s.O, s.h(), s.w(), s.width(), plane, s.O * plane};
        if (which) {
            spread_planes(planes, g, which, out);
            g += planes.outputs(), which += planes.outputs();
        } else {
            widen(s, g, out);
            g += int64_t(s.O) * s.h() * s.w();
        }
    }
};

// Outputs [first, first + N) of one sample at flat positions [q, q + V vectors).
template <int N, int V>
void forward_tile(const Shape& s, const float* x, const float* w, int first, int q, float* out, int stride) {
    Vector sum[N][V] = {};
    const int row = s.C * s.taps();
    for (int c = 0; c < s.C; c++)
        for (int i = 0; i < s.kh; i++)
            for (int j = 0; j < s.kw; j++) {
                const float* from = x + c * s.plane() + q + i * s.width() + j;
                const float* tap = w + first * row + (c * s.kh + i) * s.kw + j;
                Vector value[V];
                for (int v = 0; v < V; v++) value[v] = load(from + v * LANES);
                for (int n = 0; n < N; n++) {
                    const float weight = tap[n * row];
                    for (int v = 0; v < V; v++) sum[n][v] += weight * value[v];
                }
            }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(out + (first + n) * stride + q + v * LANES, sum[n][v]);
}

// Gradients of channels [first, first + N) at flat positions [q, q + V vectors), added for each tap. T taps of a row
// of the kernel are processed together, since for few channels loading gradients takes most of the time.
template <int N, int T, int V>
void input_tile(const Shape& s, const float* g, const float* w, int first, int i, int j, int q, float* out) {
    const int row = s.C * s.taps();
    Vector sum[N][T][V] = {};
    for (int o = 0; o < s.O; o++) {
        const float* from = g + o * s.gradient_plane() + q;
        const float* tap = w + o * row + first * s.taps() + i * s.kw + j;
        Vector value[V];
        for (int v = 0; v < V; v++) value[v] = load(from + v * LANES);
        for (int n = 0; n < N; n++)
            for (int t = 0; t < T; t++) {
                const float weight = tap[n * s.taps() + t];
                for (int v = 0; v < V; v++) sum[n][t][v] += weight * value[v];
            }
    }
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) {
            float* to = out + (first + n) * s.plane() + q + i * s.width() + j + t;
            for (int v = 0; v < V; v++) store(to + v * LANES, load(to + v * LANES) + sum[n][t][v]);
        }
}

// Weight gradients of outputs [first, first + N), channel c, row i of the kernel, columns [j, j + T), of some samples
// of one client, added to the sums of earlier samples.
template <int N, int T>
void weight_tile(const Shape& s, int B, const float* x, const float* g, int first, int c, int i, int j, float* out) {
    Vector sum[N][T] = {};
    for (int b = 0; b < B; b++) {
        const float* from = x + (b * s.C + c) * s.plane() + i * s.width() + j;
        const float* gradients = g + (b * s.O + first) * s.gradient_plane();
        for (int q = 0; q < s.flat(); q += LANES) {
            Vector value[T];
            for (int t = 0; t < T; t++) value[t] = load(from + q + t);
            for (int n = 0; n < N; n++) {
                const Vector gradient = load(gradients + n * s.gradient_plane() + q);
                for (int t = 0; t < T; t++) sum[n][t] += gradient * value[t];
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) out[((first + n) * s.C + c) * s.taps() + i * s.kw + j + t] += total(sum[n][t]);
}

template <int N>
void forward_row(const Shape& s, const float* x, const float* w, int first, float* out, int stride) {
    int q = 0;
    for (; q + WIDE * LANES <= s.flat(); q += WIDE * LANES) forward_tile<N, WIDE>(s, x, w, first, q, out, stride);
    if (WIDE > 2)
        for (; q + 2 * LANES <= s.flat(); q += 2 * LANES) forward_tile<N, 2>(s, x, w, first, q, out, stride);
    for (; q < s.flat(); q += LANES) forward_tile<N, 1>(s, x, w, first, q, out, stride);
}

template <int N, int T>
void input_taps(const Shape& s, const float* g, const float* w, int first, int i, int j, float* out) {
    int q = 0;
    for (; q + WIDE * LANES <= s.flat(); q += WIDE * LANES) input_tile<N, T, WIDE>(s, g, w, first, i, j, q, out);
    if (WIDE > 2)
        for (; q + 2 * LANES <= s.flat(); q += 2 * LANES) input_tile<N, T, 2>(s, g, w, first, i, j, q, out);
    for (; q < s.flat(); q += LANES) input_tile<N, T, 1>(s, g, w, first, i, j, q, out);
}

template <int N>
void input_row(const Shape& s, const float* g, const float* w, int first, float* out) {
    for (int i = 0; i < s.kh; i++) {
        int j = 0;
        if (N == 1) {
            for (; j + 5 <= s.kw; j += 5) input_taps<1, 5>(s, g, w, first, i, j, out);
            for (; j + 3 <= s.kw; j += 3) input_taps<1, 3>(s, g, w, first, i, j, out);
        }
        for (; j < s.kw; j++) input_taps<N, 1>(s, g, w, first, i, j, out);
    }
}

template <int T>
void weight_columns(const Shape& s, int B, const float* x, const float* g, int c, int i, int j, float* out) {
    constexpr int N = rows_beside(T);
    int o = 0;
    for (; o + N <= s.O; o += N) weight_tile<N, T>(s, B, x, g, o, c, i, j, out);
    if (N > 2)
        for (; o + 2 <= s.O; o += 2) weight_tile<2, T>(s, B, x, g, o, c, i, j, out);
    for (; o < s.O; o++) weight_tile<1, T>(s, B, x, g, o, c, i, j, out);
}

}  // namespace

extern "C" {

// With `which`, y is the max pool of the outputs.
void conv(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* w, float* y,
          uint8_t* which) {
    const Shape s{C, H, W, O, kh, kw, p};
    const int stride = s.gradient_plane();
    const Planes planes{O, s.h(), s.w(), s.width(), stride, O * stride + 4 * LANES};
    int64_t left = int64_t(K) * B * planes.outputs();
    std::vector<float> image(C * s.plane() + 4 * LANES), out(O * stride + 4 * LANES);
    for (int k = 0; k < K; k++, w += O * C * s.taps())
        for (int b = 0; b < B; b++, x += C * H * W) {
            pad_image(s, x, image.data());
            int o = 0;
            for (; o + 6 <= O; o += 6) forward_row<6>(s, image.data(), w, o, out.data(), stride);
            for (; o + 4 <= O; o += 4) forward_row<4>(s, image.data(), w, o, out.data(), stride);
            for (; o < O; o++) forward_row<1>(s, image.data(), w, o, out.data(), stride);
            if (which) {
                pool_planes(planes, out.data(), y, which, left);
                y += planes.outputs(), which += planes.outputs(), left -= planes.outputs();
                continue;
            }
            for (o = 0; o < O; o++)
                for (int i = 0; i < s.h(); i++, y += s.w()) copy_row(y, &out[o * stride + i * s.width()], s.w());
        }
}

void conv_input(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* g, const float* w,
                float* x, const uint8_t* which) {
    const Shape s{C, H, W, O, kh, kw, p};
    std::vector<float> image(C * s.plane() + 4 * LANES), wide(O * s.gradient_plane());
    Gradients gradients{s, g, which};
    for (int k = 0; k < K; k++, w += O * C * s.taps())
        for (int b = 0; b < B; b++, x += C * H * W) {
            std::fill(image.begin(), image.end(), 0.0f);
            gradients.next(wide.data());
            int c = 0;
            for (; c + 6 <= C; c += 6) input_row<6>(s, wide.data(), w, c, image.data());
            for (; c + 4 <= C; c += 4) input_row<4>(s, wide.data(), w, c, image.data());
            for (; c < C; c++) input_row<1>(s, wide.data(), w, c, image.data());
            crop_image(s, image.data(), x);
        }
}

void conv_weight(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* g,
                 float* w, const uint8_t* which) {
    const Shape s{C, H, W, O, kh, kw, p};
    const int image = C * s.plane(), gradient = O * s.gradient_plane();
    const int most = std::clamp(READ_AT_ONCE / (image + gradient), 1, B);
    std::vector<float> images(most * image + 4 * LANES), wide(most * gradient);
    Gradients gradients{s, g, which};
    for (int k = 0; k < K; k++, w += O * C * s.taps()) {
        std::fill(w, w + O * C * s.taps(), 0.0f);
        for (int first = 0; first < B; first += most) {
            const int some = std::min(most, B - first);
            for (int b = 0; b < some; b++, x += C * H * W) {
                pad_image(s, x, &images[b * image]);
                gradients.next(&wide[b * gradient]);
            }
            for (int c = 0; c < C; c++)
                for (int i = 0; i < kh; i++) {
                    int j = 0;
                    for (; j + 5 <= kw; j += 5) weight_columns<5>(s, some, images.data(), wide.data(), c, i, j, w);
                    for (; j + 3 <= kw; j += 3) weight_columns<3>(s, some, images.data(), wide.data(), c, i, j, w);
                    for (; j < kw; j++) weight_columns<1>(s, some, images.data(), wide.data(), c, i, j, w);
                }
        }
    }
}

void pool(int64_t planes, int H, int W, const float* x, float* y, uint8_t* which) {
    const Planes p = dense(planes, H, W);
    pool_planes(p, x, y, which, p.outputs());
}

// The values of x at the positions in `which`: the derivative of the pool in direction x.
void pool_pick(int64_t planes, int H, int W, const float* x, const uint8_t* which, float* y) {
    const Planes p = dense(planes, H, W);
    each_run(p, [&](int64_t upper, int64_t lower, int64_t place, int left, int64_t room) {
        const auto [v] = load_blocks(x + upper, x + lower, left, room);
        Bytes bytes = {};
        std::memcpy(&bytes, which + place, left);
        const Mask from = __builtin_convertvector(bytes, Mask);
        const Vector top = from == 1 ? v[1] : v[0], bottom = from == 3 ? v[3] : v[2];
        store_run(y + place, from >= 2 ? bottom : top, left, p.outputs() - place);
    });
}

// The adjoint of pool_pick: each gradient is written to the position of its maximum.
void pool_spread(int64_t planes, int H, int W, const float* g, const uint8_t* which, float* x) {
    if (H % 2 || W % 2) std::fill(x, x + planes * H * W, 0.0f);
    spread_planes(dense(planes, H, W), g, which, x);
}

}  // extern "C"

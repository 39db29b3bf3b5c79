// Convolutions and max pools of many clients together; every client has its own weights.
//
// All tensors are float32 and contiguous; K clients with B samples each have x [K, B, C, H, W],
// w [K, O, C, kh, kw], y [K, B, O, h, w]; the stride is 1 and p is the padding, so h = H + 2p - kh + 1.
//
// Each sample is copied once into a padded scratch image with rows of W + 2p. In the flat image, output q is
// y[o, q] = sum_{c, i, j} w[o, c, i, j] x[c, q + i (W + 2p) + j],  so every load is contiguous for any width of the
// image. The last kw - 1 columns of each row are computed, but not used. The derivative by the input is such a convolution
// too: of the gradients, padded by kh - 1 - p and kw - 1 - p, with the kernels rotated by half a turn.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pooled.h"
#include "pools.h"
#include "vectors.h"

namespace {

// The most rows of outputs in a tile, and the vectors of positions for fewer: sums, the positions' numbers and one factor
// fit into the registers.
constexpr int ROWS = REGISTERS >= 32 ? 6 : 4;
constexpr int vectors_beside(int rows) { return std::min((REGISTERS - 1) / (rows + 1), 8); }

// Rows of a tile of T columns whose sums, with T numbers and one factor, fit into the registers.
constexpr int rows_beside(int T) { return (REGISTERS - 1 - T) / T >= 4 ? 4 : 2; }

// A convolution of images [C, H, W] with padding ph above and below, and pw to the left and right; negative ones crop.
struct Shape {
    int C, H, W, O, kh, kw, ph, pw;
    int width() const { return W + 2 * pw; }
    int h() const { return H + 2 * ph - kh + 1; }
    int w() const { return width() - kw + 1; }
    int taps() const { return kh * kw; }
    // Flat outputs, and the size of a plane of the scratch image with room for reads beyond its end.
    int flat() const { return h() * width(); }
    int plane() const { return up(flat(), LANES) + (kh - 1) * width() + kw + LANES; }
    int output_plane() const { return up(flat(), LANES); }
    // Of the gradients [O, h, w] with the rotated kernels, to the images.
    Shape adjoint() const { return {O, h(), w(), C, kh, kw, kh - 1 - ph, kw - 1 - pw}; }
};

// Planes [channels, H, W], sample by sample.
class Images {
  public:
    Images(int channels, int H, int W, const float* from) : channels_(channels), H_(H), W_(W), from_(from) {}

    // Write the next sample to planes of zeros, from row ph and column pw on; negative ones crop, by as much at each side.
    void next(float* to, int ph, int pw, int pitch, int apart) {
        const int top = std::max(-ph, 0), left = std::max(-pw, 0);
        for (int c = 0; c < channels_; c++, from_ += H_ * W_, to += apart)
            for (int i = top; i < H_ - top; i++)
                copy_row(to + (i + ph) * pitch + left + pw, from_ + i * W_ + left, W_ - 2 * left);
    }

  private:
    int channels_, H_, W_;
    const float* from_;
};

// Kernels in the order in which tiles read them: by block, channel and tap, the numbers of the block's rows. Those of row o
// and channel c begin at w + o * by_row + c * by_channel.
void pack(const Shape& s, const float* w, int64_t by_row, int64_t by_channel, bool rotated, float* to) {
    each_block(s.O, ROWS, [&](int first, int rows) {
        for (int c = 0; c < s.C; c++)
            for (int tap = 0; tap < s.taps(); tap++)
                for (int row = 0; row < rows; row++)
                    *to++ = w[(first + row) * by_row + c * by_channel + (rotated ? s.taps() - 1 - tap : tap)];
    });
}

// N rows of outputs of one sample at flat positions [q, q + V vectors). Not unrolled: with the loads of several taps at a
// time, sums would not fit into the registers.
template <int N, int V>
__attribute__((always_inline)) inline void tile(const Shape& s, const float* x, const float* w, int q, float* out, int stride) {
    Vector sum[N][V] = {};
    for (int c = 0; c < s.C; c++)
        for (int i = 0; i < s.kh; i++) {
            const float* from = x + c * s.plane() + i * s.width() + q;
#pragma GCC unroll 1
            for (int j = 0; j < s.kw; j++, w += N) {
                Vector value[V];
                for (int v = 0; v < V; v++) value[v] = kept(load(from + j + v * LANES));
                for (int n = 0; n < N; n++) {
                    const Vector factor = splat(w[n]);
                    for (int v = 0; v < V; v++) sum[n][v] += factor * value[v];
                }
            }
        }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(out + n * stride + q + v * LANES, sum[n][v]);
}

// All positions of N rows of outputs or fewer.
template <int N>
void tiles(int rows, const Shape& s, const float* x, const float* w, float* out, int stride) {
    if constexpr (N > 1)
        if (rows < N) return tiles<N - 1>(rows, s, x, w, out, stride);
    constexpr int most = vectors_beside(N), half = (most + 1) / 2;
    int q = 0;
    for (; q + most * LANES <= s.flat(); q += most * LANES) tile<N, most>(s, x, w, q, out, stride);
    for (; q + half * LANES <= s.flat(); q += half * LANES) tile<N, half>(s, x, w, q, out, stride);
    for (; q < s.flat(); q += LANES) tile<N, 1>(s, x, w, q, out, stride);
}

// Convolutions of B samples with packed kernels; with `which`, y is the max pool of the outputs.
class Convolver {
  public:
    explicit Convolver(const Shape& s)
        : s_(s), image_(s.C * s.plane() + 4 * LANES), out_(ROWS * s.output_plane() + 4 * LANES), packed_(s.O * s.C * s.taps()) {}

    float* packed() { return packed_.data(); }

    // `left` counts the numbers for which y has room.
    void convolve(int B, Images& images, float* y, uint8_t* which, int64_t left) {
        const int stride = s_.output_plane();
        for (int b = 0; b < B; b++) {
            images.next(image_.data(), s_.ph, s_.pw, s_.width(), s_.plane());
            each_block(s_.O, ROWS, [&](int first, int rows) {
                tiles<ROWS>(rows, s_, image_.data(), &packed_[first * s_.C * s_.taps()], out_.data(), stride);
                if (which) {
                    const Planes planes{rows, s_.h(), s_.w(), s_.width(), stride, int64_t(out_.size())};
                    pool_planes(planes, out_.data(), y, which, left);
                    y += planes.outputs(), which += planes.outputs(), left -= planes.outputs();
                    return;
                }
                for (int row = 0; row < rows; row++)
                    for (int i = 0; i < s_.h(); i++, y += s_.w())
                        copy_row(y, &out_[row * stride + i * s_.width()], s_.w());
            });
        }
    }

  private:
    const Shape s_;
    std::vector<float> image_, out_, packed_;
};

// Weight gradients of outputs [first, first + N), channel c, row i of the kernel, columns [j, j + T), of some samples
// of one client, added to the sums of earlier samples.
template <int N, int T>
void weight_tile(const Shape& s, int B, const float* x, const float* g, int first, int c, int i, int j, float* out) {
    Vector sum[N][T] = {};
    for (int b = 0; b < B; b++) {
        const float* from = x + (b * s.C + c) * s.plane() + i * s.width() + j;
        const float* gradients = g + (b * s.O + first) * s.output_plane();
        for (int q = 0; q < s.flat(); q += LANES) {
            Vector value[T];
            for (int t = 0; t < T; t++) value[t] = kept(load(from + q + t));
            for (int n = 0; n < N; n++) {
                const Vector gradient = kept(load(gradients + n * s.output_plane() + q));
                for (int t = 0; t < T; t++) sum[n][t] += gradient * value[t];
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) out[((first + n) * s.C + c) * s.taps() + i * s.kw + j + t] += total(sum[n][t]);
}

// The same of all channels and rows of the kernel. The outputs' gradients stay in the first-level cache.
template <int N, int T>
void weight_tiles(const Shape& s, int B, const float* x, const float* g, int first, int j, float* out) {
    for (int c = 0; c < s.C; c++)
        for (int i = 0; i < s.kh; i++) weight_tile<N, T>(s, B, x, g, first, c, i, j, out);
}

template <int T>
void weight_columns(const Shape& s, int B, const float* x, const float* g, int j, float* out) {
    constexpr int N = rows_beside(T);
    int o = 0;
    for (; o + N <= s.O; o += N) weight_tiles<N, T>(s, B, x, g, o, j, out);
    if (N > 2)
        for (; o + 2 <= s.O; o += 2) weight_tiles<2, T>(s, B, x, g, o, j, out);
    for (; o < s.O; o++) weight_tiles<1, T>(s, B, x, g, o, j, out);
}

}  // namespace

extern "C" {

// With `which`, y is the max pool of the outputs.
void conv(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* w, float* y,
          uint8_t* which) {
    const Shape s{C, H, W, O, kh, kw, p, p};
    const int64_t outputs = int64_t(B) * O * (which ? (s.h() / 2) * (s.w() / 2) : s.h() * s.w());
    Convolver convolver(s);
    Images images(C, H, W, x);
    for (int64_t k = 0; k < K; k++) {
        pack(s, w + k * O * C * s.taps(), C * s.taps(), s.taps(), false, convolver.packed());
        convolver.convolve(B, images, y + k * outputs, which ? which + k * outputs : nullptr, (K - k) * outputs);
    }
}

void conv_input(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* g, const float* w,
                float* x) {
    const Shape s = Shape{C, H, W, O, kh, kw, p, p}.adjoint();
    Convolver convolver(s);
    Images gradients(O, s.H, s.W, g);
    for (int64_t k = 0; k < K; k++) {
        pack(s, w + k * O * C * s.taps(), s.taps(), C * s.taps(), true, convolver.packed());
        convolver.convolve(B, gradients, x + k * B * C * H * W, nullptr, 0);
    }
}

void conv_weight(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* g,
                 float* w) {
    const Shape s{C, H, W, O, kh, kw, p, p};
    const int image = C * s.plane(), gradient = O * s.output_plane();
    const int most = std::clamp(CACHED / (s.plane() + 4 * s.output_plane()), 1, B);
    std::vector<float> xs(most * image + 4 * LANES), gs(most * gradient + 4 * LANES);
    Images images(C, H, W, x), gradients(O, s.h(), s.w(), g);
    for (int k = 0; k < K; k++, w += O * C * s.taps()) {
        std::fill(w, w + O * C * s.taps(), 0.0f);
        for (int first = 0; first < B; first += most) {
            const int some = std::min(most, B - first);
            for (int b = 0; b < some; b++) {
                images.next(&xs[b * image], p, p, s.width(), s.plane());
                gradients.next(&gs[b * gradient], 0, 0, s.width(), s.output_plane());
            }
            int j = 0;
            for (; j + 5 <= kw; j += 5) weight_columns<5>(s, some, xs.data(), gs.data(), j, w);
            for (; j + 3 <= kw; j += 3) weight_columns<3>(s, some, xs.data(), gs.data(), j, w);
            for (; j < kw; j++) weight_columns<1>(s, some, xs.data(), gs.data(), j, w);
        }
    }
}

// The same with the gradients g [K, B, O, h / 2, w / 2] of the outputs' max pool, which has its maxima at `which`.
void pooled_input(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* g, const float* w, float* x,
                  const uint8_t* which) {
    derive<true>(K, B, {C, H, W, O, kh, kw, p}, x, g, w, which);
}

void pooled_weight(int K, int B, int C, int H, int W, int O, int kh, int kw, int p, const float* x, const float* g, float* w,
                   const uint8_t* which) {
    derive<false>(K, B, {C, H, W, O, kh, kw, p}, x, g, w, which);
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

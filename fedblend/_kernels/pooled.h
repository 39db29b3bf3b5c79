// Derivatives of a convolution whose outputs went through a 2x2 max pool, from the gradients of the pool's outputs.
//
// Of a pool's four inputs one has a gradient, and none where a ReLU or dropout left zero. Only the others are visited:
// an eighth of the products of the plain sums is usual. Tensors are as in kernels.cpp, g [K, B, O, h / 2, w / 2], and
// `which` has the places of the maxima.
//
// Images are copied with channels last, [H + 2p, W + 2p, a vector of channels]. What a gradient at (y, x) meets in a row of
// the kernel is then one run of kw * channels numbers from (y + i, x) on.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace {

// Vectors of a kernel that stay in registers beside a factor; the most vectors of a run and rows of a kernel at a time.
constexpr int KEPT = REGISTERS - 4, MOST_VECTORS = 4, MOST_ROWS = 5;

struct PooledConvolution {
    int C, H, W, O, kh, kw, p;
    int height() const { return H + 2 * p; }
    int width() const { return W + 2 * p; }
    int pixels() const { return height() * width(); }
    int high() const { return (height() - kh + 1) / 2; }
    int wide() const { return (width() - kw + 1) / 2; }
    int pooled() const { return high() * wide(); }
    // Channels at a time, and the numbers of all of a kernel's rows for so many.
    int most() const { return std::min(C, LANES); }
    int blocks() const { return (C + most() - 1) / most(); }
    int run(int some) const { return up(kw * some, LANES); }
    int kernel() const { return kh * run(most()); }
    // The first pixel of a pool's corner, of four.
    int pixel(int i, int j, int corner) const { return (2 * i + corner / 2) * width() + 2 * j + corner % 2; }
};

// A gradient that is not zero, at a pixel.
struct Gradient {
    int pixel;
    float value;
};

// For each gradient and each of R rows of a kernel, V vectors: add gradient * image to the kernel, or gradient * kernel to
// the image. Rows are `pitch` apart in the image, and `apart` in the kernel.
template <bool TO_IMAGE, int V, int R>
void multiply(const Gradient* g, const Gradient* end, float* image, int some, int pitch, float* kernel, int apart) {
    Vector kept[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) kept[r][v] = TO_IMAGE ? load(kernel + r * apart + v * LANES) : Vector{};
    for (; g < end; g++) {
        float* const at = image + int64_t(g->pixel) * some;
        const Vector factor = splat(g->value);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                float* const number = at + r * pitch + v * LANES;
                if constexpr (TO_IMAGE)
                    store(number, load(number) + factor * kept[r][v]);
                else
                    kept[r][v] += factor * load(number);
            }
    }
    // Added at the end: sums of many numbers by parts round less.
    for (int r = 0; r < R && !TO_IMAGE; r++)
        for (int v = 0; v < V; v++) {
            float* const sum = kernel + r * apart + v * LANES;
            store(sum, load(sum) + kept[r][v]);
        }
}

template <bool TO_IMAGE, int V, int R>
void multiply_rows(int rows, const Gradient* g, const Gradient* end, float* image, int some, int pitch, float* kernel, int apart) {
    for (; rows >= R; rows -= R, image += R * pitch, kernel += R * apart)
        multiply<TO_IMAGE, V, R>(g, end, image, some, pitch, kernel, apart);
    if constexpr (R > 1)
        if (rows) multiply_rows<TO_IMAGE, V, R - 1>(rows, g, end, image, some, pitch, kernel, apart);
}

// The same of `rows` rows of `run` numbers.
template <bool TO_IMAGE, int V = MOST_VECTORS>
void multiply_all(int rows, int run, const Gradient* g, const Gradient* end, float* image, int some, int pitch, float* kernel,
                  int apart) {
    for (; run >= V * LANES; run -= V * LANES, image += V * LANES, kernel += V * LANES)
        multiply_rows<TO_IMAGE, V, TO_IMAGE ? MOST_ROWS : std::min(KEPT / V, MOST_ROWS)>(rows, g, end, image, some, pitch, kernel, apart);
    if constexpr (V > 1)
        if (run) multiply_all<TO_IMAGE, V - 1>(rows, run, g, end, image, some, pitch, kernel, apart);
}

// Copy the pixels of an image [C, H, W] to [H, W, C] within the padding, or back.
template <bool BACK, class X>
void turn(const PooledConvolution& s, X* x, int some, float* image) {
    image += (s.p * s.width() + s.p) * some;
    for (int i = 0; i < s.H; i++) {
        float* const row = image + i * s.width() * some;
        int j = 0;
        if (some == LANES)
            for (; j + LANES <= s.W; j += LANES) {
                Vector v[LANES];
                for (int n = 0; n < LANES; n++) v[n] = load(BACK ? row + (j + n) * LANES : x + n * s.H * s.W + i * s.W + j);
                exchange(v);
                for (int n = 0; n < LANES; n++)
                    if constexpr (BACK)
                        store(x + n * s.H * s.W + i * s.W + j, v[n]);
                    else
                        store(row + (j + n) * LANES, v[n]);
            }
        for (int c = 0; c < some; c++)
            for (int n = j; n < s.W; n++)
                if constexpr (BACK)
                    x[c * s.H * s.W + i * s.W + n] = row[n * some + c];
                else
                    row[n * some + c] = x[c * s.H * s.W + i * s.W + n];
    }
}

// Call `work(block, first, some)` on blocks of channels.
template <class Work>
void each_channels(const PooledConvolution& s, Work work) {
    for (int block = 0; block < s.blocks(); block++)
        work(block, block * s.most(), std::min(s.most(), s.C - block * s.most()));
}

// Call `work(o, c, i, j, number)` on the numbers of kernels [O, C, kh, kw], which are at `number` by block of channels:
// [blocks, O, kh, run].
template <class Work>
void each_weight(const PooledConvolution& s, Work work) {
    each_channels(s, [&](int block, int first, int some) {
        for (int o = 0; o < s.O; o++)
            for (int c = 0; c < some; c++)
                for (int i = 0; i < s.kh; i++)
                    for (int j = 0; j < s.kw; j++)
                        work((int64_t(o * s.C + first + c) * s.kh + i) * s.kw + j,
                             (int64_t(block) * s.O + o) * s.kernel() + i * s.run(some) + j * some + c);
    });
}

template <bool TO_IMAGE, class X, class W>
void derive(int K, int B, const PooledConvolution& s, X* x, const float* g, W* w, const uint8_t* which) {
    const int samples = std::clamp(CACHED / (s.pixels() * s.most()), 1, B);
    const int64_t numbers = int64_t(samples) * s.pixels() * s.most() + s.run(s.most());
    const int64_t weights = int64_t(s.blocks()) * s.O * s.kernel();
    Room images(numbers), kernels(weights);
    if (TO_IMAGE) std::fill_n(kernels + 0, weights, 0.0f);
    std::vector<Gradient> all(size_t(samples) * s.O * s.pooled() + 1);
    std::vector<int64_t> ends(s.O + 1);
    for (int k = 0; k < K; k++, w += s.O * s.C * s.kh * s.kw) {
        if constexpr (TO_IMAGE)
            each_weight(s, [&](int64_t of_w, int64_t number) { kernels[number] = w[of_w]; });
        else
            std::fill_n(kernels + 0, weights, 0.0f);
        for (int done = 0, n; done < B; done += n) {
            n = std::min(samples, B - done);
            int64_t at = 0;
            for (int o = 0; o < s.O; o++, ends[o] = at)
                for (int b = 0; b < n; b++) {
                    int64_t place = (int64_t(b) * s.O + o) * s.pooled();
                    for (int i = 0; i < s.high(); i++)
                        for (int j = 0; j < s.wide(); j++, place++) {
                            all[at] = {b * s.pixels() + s.pixel(i, j, which[place]), g[place]};
                            at += g[place] != 0;
                        }
                }
            each_channels(s, [&](int block, int first, int some) {
                std::fill_n(images + 0, numbers, 0.0f);
                const auto turn_all = [&] {
                    for (int b = 0; b < n; b++)
                        turn<TO_IMAGE>(s, x + (int64_t(b) * s.C + first) * s.H * s.W, some, images + b * s.pixels() * some);
                };
                if (!TO_IMAGE) turn_all();
                for (int o = 0; o < s.O; o++)
                    multiply_all<TO_IMAGE>(s.kh, s.run(some), &all[ends[o]], &all[ends[o + 1]], images, some, s.width() * some,
                                           kernels + (int64_t(block) * s.O + o) * s.kernel(), s.run(some));
                if (TO_IMAGE) turn_all();
            });
            x += int64_t(n) * s.C * s.H * s.W, g += int64_t(n) * s.O * s.pooled(), which += int64_t(n) * s.O * s.pooled();
        }
        if constexpr (!TO_IMAGE) each_weight(s, [&](int64_t of_w, int64_t number) { w[of_w] = kernels[number]; });
    }
}

}  // namespace

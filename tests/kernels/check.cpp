// The kernels of convolutions, and pools against plain loops in double precision, for any instruction set.
//
// Linked with kernels.cpp and winograd.cpp. Exit code 0 if all results are as exact as float32 sums can be.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

extern "C" {
void conv(int, int, int, int, int, int, int, int, int, const float*, const float*, float*, uint8_t*);
void conv_input(int, int, int, int, int, int, int, int, int, const float*, const float*, float*);
void conv_weight(int, int, int, int, int, int, int, int, int, const float*, const float*, float*);
void pooled_input(int, int, int, int, int, int, int, int, int, const float*, const float*, float*, const uint8_t*);
void pooled_weight(int, int, int, int, int, int, int, int, int, const float*, const float*, float*, const uint8_t*);
void pool(int64_t, int, int, const float*, float*, uint8_t*);
void pool_pick(int64_t, int, int, const float*, const uint8_t*, float*);
void pool_spread(int64_t, int, int, const float*, const uint8_t*, float*);
void winograd_conv(int, int, int, int, int, int, int, int, int, int, const float*, const float*, float*, uint8_t*);
void winograd_conv_input(int, int, int, int, int, int, int, int, int, int, const float*, const float*, float*, const uint8_t*);
void winograd_conv_weight(int, int, int, int, int, int, int, int, int, int, const float*, const float*, float*);
}

typedef std::vector<float> Numbers;
typedef std::vector<double> Exact;

// Error of a sum, as a share of the largest number.
constexpr double ALLOWED = 2e-6;

std::mt19937 generator(1);
int failures = 0;

Numbers draw(size_t n) {
    std::normal_distribution<float> normal;
    Numbers made(n);
    for (float& number : made) number = normal(generator);
    return made;
}

void compare(const char* what, const Numbers& made, const Exact& wanted, double allowed = ALLOWED) {
    double largest = 0, error = 0;
    for (const double number : wanted) largest = std::max(largest, std::abs(number));
    for (size_t i = 0; i < wanted.size(); i++) {
        const double difference = std::abs(made[i] - wanted[i]);
        error = std::max(error, std::isnan(difference) ? HUGE_VAL : difference);
    }
    if (error > allowed * largest) {
        std::printf("%s: error %g of %g\n", what, error, largest);
        failures++;
    }
}

// The 2x2 max pool of planes: values, and which of the four numbers is the first maximum.
void plain_pool(int64_t planes, int H, int W, const Numbers& x, Exact& y, std::vector<uint8_t>& which) {
    for (int64_t n = 0; n < planes; n++)
        for (int i = 0; i < H / 2; i++)
            for (int j = 0; j < W / 2; j++) {
                int best = 0;
                const auto at = [&](int corner) { return x[(n * H + 2 * i + corner / 2) * W + 2 * j + corner % 2]; };
                for (int corner = 1; corner < 4; corner++)
                    if (at(corner) > at(best)) best = corner;
                y.push_back(at(best));
                which.push_back(best);
            }
}

Numbers plain_spread(int64_t planes, int H, int W, const Numbers& g, const std::vector<uint8_t>& which) {
    Numbers x(planes * H * W);
    for (int64_t n = 0, place = 0; n < planes; n++)
        for (int i = 0; i < H / 2; i++)
            for (int j = 0; j < W / 2; j++, place++)
                x[(n * H + 2 * i + which[place] / 2) * W + 2 * j + which[place] % 2] = g[place];
    return x;
}

void check_convolution(int K, int B, int C, int H, int W, int O, int kh, int kw, int p) {
    const int h = H + 2 * p - kh + 1, w = W + 2 * p - kw + 1;
    const Numbers x = draw(size_t(K) * B * C * H * W), weights = draw(size_t(K) * O * C * kh * kw);
    Exact y(size_t(K) * B * O * h * w);
    // Call `work(output, input, weight)` with the positions of the factors of every product.
    const auto each_product = [&](auto work) {
        for (int kb = 0; kb < K * B; kb++)
            for (int o = 0; o < O; o++)
                for (int c = 0; c < C; c++)
                    for (int i = 0; i < h; i++)
                        for (int j = 0; j < w; j++)
                            for (int a = 0; a < kh; a++)
                                for (int b = 0; b < kw; b++) {
                                    const int row = i + a - p, column = j + b - p;
                                    if (row < 0 || row >= H || column < 0 || column >= W) continue;
                                    work(((size_t(kb) * O + o) * h + i) * w + j,
                                         ((size_t(kb) * C + c) * H + row) * W + column,
                                         ((size_t(kb / B) * O + o) * C + c) * kh * kw + a * kw + b);
                                }
    };
    each_product([&](size_t to, size_t from, size_t tap) { y[to] += double(x[from]) * weights[tap]; });
    Numbers made(y.size());
    conv(K, B, C, H, W, O, kh, kw, p, x.data(), weights.data(), made.data(), nullptr);
    compare("conv", made, y);

    const int64_t planes = int64_t(K) * B * O, pooled = planes * (h / 2) * (w / 2);
    Exact largest;
    std::vector<uint8_t> which, places(pooled);
    plain_pool(planes, h, w, made, largest, which);
    Numbers values(pooled);
    if (pooled) conv(K, B, C, H, W, O, kh, kw, p, x.data(), weights.data(), values.data(), places.data());
    compare("conv with pool", values, largest, 0);
    if (places != which) failures++, std::printf("conv with pool: other maxima\n");

    Numbers few = draw(pooled);
    for (float& number : few)
        if (number < -0.5) number = 0;
    const Numbers spread = plain_spread(planes, h, w, few, which);
    for (const bool inside : {false, true}) {
        if (inside && !pooled) continue;
        const Numbers g = inside ? spread : draw(y.size());
        Exact by_input(x.size()), by_weight(weights.size());
        each_product([&](size_t to, size_t from, size_t tap) {
            by_input[from] += double(g[to]) * weights[tap];
            by_weight[tap] += double(g[to]) * x[from];
        });
        Numbers input(x.size()), weight(weights.size());
        if (inside) {
            pooled_input(K, B, C, H, W, O, kh, kw, p, few.data(), weights.data(), input.data(), which.data());
            pooled_weight(K, B, C, H, W, O, kh, kw, p, x.data(), few.data(), weight.data(), which.data());
        } else {
            conv_input(K, B, C, H, W, O, kh, kw, p, g.data(), weights.data(), input.data());
            conv_weight(K, B, C, H, W, O, kh, kw, p, x.data(), g.data(), weight.data());
        }
        compare(inside ? "conv_input with pool" : "conv_input", input, by_input);
        compare(inside ? "conv_weight with pool" : "conv_weight", weight, by_weight);
    }
}

// The three forms by Winograd's algorithm, alone and with a pool, against the direct kernels.
void check_winograd(int M, int K, int B, int C, int H, int W, int O, int p) {
    const double allowed = M == 4 ? 4 * ALLOWED : ALLOWED;
    const int h = H + 2 * p - 2, w = W + 2 * p - 2;
    const Numbers x = draw(size_t(K) * B * C * H * W), weights = draw(size_t(K) * O * C * 9);
    const size_t outputs = size_t(K) * B * O * h * w, pooled = size_t(K) * B * O * (h / 2) * (w / 2);
    Numbers direct(outputs), made(outputs);
    conv(K, B, C, H, W, O, 3, 3, p, x.data(), weights.data(), direct.data(), nullptr);
    winograd_conv(M, K, B, C, H, W, O, 3, 3, p, x.data(), weights.data(), made.data(), nullptr);
    compare("winograd", made, Exact(direct.begin(), direct.end()), allowed);

    Exact largest;
    std::vector<uint8_t> which, places(pooled);
    plain_pool(int64_t(K) * B * O, h, w, made, largest, which);
    Numbers values(pooled);
    if (pooled) winograd_conv(M, K, B, C, H, W, O, 3, 3, p, x.data(), weights.data(), values.data(), places.data());
    compare("winograd with pool", values, largest, 0);
    if (places != which) failures++, std::printf("winograd with pool: other maxima\n");

    for (const bool inside : {false, true}) {
        if (inside && !pooled) continue;
        const Numbers g = draw(inside ? pooled : outputs);
        const uint8_t* at = inside ? which.data() : nullptr;
        Numbers by_input(x.size()), by_weight(weights.size()), input(x.size()), weight(weights.size());
        if (inside) {
            pooled_input(K, B, C, H, W, O, 3, 3, p, g.data(), weights.data(), by_input.data(), at);
        } else {
            conv_input(K, B, C, H, W, O, 3, 3, p, g.data(), weights.data(), by_input.data());
            conv_weight(K, B, C, H, W, O, 3, 3, p, x.data(), g.data(), by_weight.data());
            winograd_conv_weight(M, K, B, C, H, W, O, 3, 3, p, x.data(), g.data(), weight.data());
        }
        winograd_conv_input(M, K, B, C, H, W, O, 3, 3, p, g.data(), weights.data(), input.data(), at);
        compare(inside ? "winograd by input with pool" : "winograd by input", input, Exact(by_input.begin(), by_input.end()),
                allowed);
        compare("winograd by weights", weight, Exact(by_weight.begin(), by_weight.end()), allowed);
    }
}

void check_pool(int64_t planes, int H, int W, bool ties) {
    Numbers x = draw(planes * H * W);
    if (ties)
        for (float& number : x) number = std::round(number);
    Exact largest;
    std::vector<uint8_t> which, places(planes * (H / 2) * (W / 2));
    plain_pool(planes, H, W, x, largest, which);
    Numbers values(places.size()), picked(places.size()), spread(x.size());
    pool(planes, H, W, x.data(), values.data(), places.data());
    compare("pool", values, largest, 0);
    if (places != which) failures++, std::printf("pool: other maxima\n");
    pool_pick(planes, H, W, x.data(), which.data(), picked.data());
    compare("pool_pick", picked, largest, 0);
    const Numbers g = draw(places.size()), wanted = plain_spread(planes, H, W, g, which);
    pool_spread(planes, H, W, g.data(), which.data(), spread.data());
    compare("pool_spread", spread, Exact(wanted.begin(), wanted.end()), 0);
}

int main() {
    // Sizes at and beside the widths and heights of tiles for vectors of 4, 8 and 16 numbers.
    // Padding beyond a kernel's size crops gradients.
    const int kernels[][3] = {{5, 5, 2}, {5, 5, 0}, {3, 3, 1}, {1, 1, 0}, {2, 4, 1}, {6, 1, 0}, {1, 7, 2}, {4, 2, 2}};
    for (const auto& [kh, kw, p] : kernels)
        for (const int side : {6, 11, 17}) {
            check_convolution(2, 3, 1, side, side + 2, 6, kh, kw, p);
            check_convolution(1, 2, 6, side, side, 17, kh, kw, p);
            check_convolution(1, 2, 11, side, side + 5, 5, kh, kw, p);
        }
    check_convolution(1, 40, 2, 40, 40, 3, 3, 3, 1);
    for (const int M : {2, 4}) {
        for (const int side : {3, 8, 13, 16, 34})
            for (const int p : {0, 1, 2}) {
                check_winograd(M, 2, 2, 3, side, side + 1, 5, p);
                check_winograd(M, 1, 1, 17, side, side, 9, p);
            }
        // Blocks of a part of a sample, and of several samples; few rows are left for the last one.
        check_winograd(M, 1, 2, 40, 36, 36, 33, 1);
        check_winograd(M, 1, 2, 40, 37, 37, 33, 1);
        check_winograd(M, 2, 11, 70, 8, 8, 67, 1);
    }
    for (const int width : {2, 7, 8, 15, 16, 17, 31, 32, 33, 66})
        for (const bool ties : {false, true}) check_pool(3, 5, width, ties), check_pool(2, 8, width, ties);
    return failures > 0;
}

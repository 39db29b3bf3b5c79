// AugMix's views of a batch of images: chains of operations on grey levels, as Pillow computes them, and their mixture.
//
// Images are uint8, contiguous; K stacks of B images, V views of each, n chains of up to D operations a view. The
// numbers are those of augmix.py, and so are the results, level for level: products and sums are rounded one by
// one, in double precision. What follows comes before the headers, so that their functions can still be inlined.

#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

enum { AUTOCONTRAST, EQUALIZE, POSTERIZE, ROTATE, SOLARIZE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y };

typedef uint8_t Table[256];

struct Picture {
    int C, H, W;
    int plane() const { return H * W; }
    int size() const { return C * H * W; }
};

// Tables ---------------------------------------------------------------------------------------------------------

void autocontrast(const uint8_t* in, int count, Table table) {
    int low = 255, high = 0;
    for (int i = 0; i < count; ++i) {
        low = std::min<int>(low, in[i]);
        high = std::max<int>(high, in[i]);
    }
    const double stretch = 255.0 / std::max(1, high - low), offset = -low * stretch;
    for (int i = 0; i < 256; ++i)
        table[i] = high <= low ? i : static_cast<int>(std::clamp(std::trunc(i * stretch + offset), 0.0, 255.0));
}

void equalize(const uint8_t* in, int count, Table table) {
    // Four counts of each level, so that equal neighbours do not wait for each other.
    uint32_t counts[4][256] = {};
    for (int i = 0; i < count; ++i) ++counts[i & 3][in[i]];
    int last = 0;
    for (int i = 0; i < 256; ++i) {
        counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
        if (counts[0][i]) last = i;
    }
    const uint32_t step = (count - counts[0][last]) / 255;
    uint32_t below = step / 2;
    for (int i = 0; i < 256; ++i) {
        table[i] = step ? std::min<uint32_t>(255, below / step) : i;
        below += counts[0][i];
    }
}

void look_up(uint8_t* image, Picture p, int operation, int amount) {
    Table table;
    for (int c = 0; c < p.C; ++c) {
        uint8_t* levels = image + c * p.plane();
        if (operation == AUTOCONTRAST) autocontrast(levels, p.plane(), table);
        if (operation == EQUALIZE) equalize(levels, p.plane(), table);
        if (operation == POSTERIZE)
            for (int i = 0; i < 256; ++i) table[i] = i & ~((1 << (4 + std::min(amount, 3))) - 1);
        if (operation == SOLARIZE)
            for (int i = 0; i < 256; ++i) table[i] = i < 256 - amount ? i : 255 - i;
        for (int i = 0; i < p.plane(); ++i) levels[i] = table[levels[i]];
    }
}

// Affine maps ----------------------------------------------------------------------------------------------------

// Move by whole pixels: no interpolation.
void translate(const uint8_t* in, uint8_t* out, Picture p, int by_x, int by_y) {
    std::memset(out, 0, p.size());
    const int first = std::max(0, -by_x), count = p.W - std::abs(by_x);
    if (count <= 0) return;
    for (int c = 0; c < p.C; ++c)
        for (int y = std::max(0, -by_y); y < std::min(p.H, p.H - by_y); ++y)
            std::memcpy(out + (c * p.H + y) * p.W + first, in + (c * p.H + y + by_y) * p.W + first + by_x, count);
}

// See the image through (x, y) -> (a x + b y + c, d x + e y + f), by bilinear interpolation; 0 outside.
// `along` and `left` are room for two and five numbers a column.
void resample(const uint8_t* in, uint8_t* out, Picture p, const double* m, double* along, int* left) {
    double* down = along + p.W;
    int *right = left + p.W, *top = right + p.W, *bottom = top + p.W, *inside = bottom + p.W;
    for (int y = 0; y < p.H; ++y) {
        for (int x = 0; x < p.W; ++x) {
            const double at_x = m[0] * (x + 0.5) + m[1] * (y + 0.5) + m[2];
            const double at_y = m[3] * (x + 0.5) + m[4] * (y + 0.5) + m[5];
            inside[x] = (at_x >= 0) & (at_x < p.W) & (at_y >= 0) & (at_y < p.H);
            const double column = std::floor(at_x - 0.5), row = std::floor(at_y - 0.5);
            along[x] = at_x - 0.5 - column;
            down[x] = at_y - 0.5 - row;
            left[x] = std::clamp(static_cast<int>(column), 0, p.W - 1);
            right[x] = std::clamp(static_cast<int>(column) + 1, 0, p.W - 1);
            top[x] = std::clamp(static_cast<int>(row), 0, p.H - 1) * p.W;
            bottom[x] = std::clamp(static_cast<int>(row) + 1, 0, p.H - 1) * p.W;
        }
        for (int c = 0; c < p.C; ++c) {
            const uint8_t* levels = in + c * p.plane();
            uint8_t* line = out + c * p.plane() + y * p.W;
            for (int x = 0; x < p.W; ++x) {
                const double a = levels[top[x] + left[x]], b = levels[top[x] + right[x]];
                const double d = levels[bottom[x] + left[x]], e = levels[bottom[x] + right[x]];
                const double upper = a + (b - a) * along[x], lower = d + (e - d) * along[x];
                line[x] = inside[x] ? static_cast<int>(upper + (lower - upper) * down[x]) : 0;
            }
        }
    }
}

// One image's operations, with the two pictures and the rows they work in.
class Chain {
  public:
    Chain(Picture p, const double* turns)
        : p(p), turns(turns), now(p.size()), next(p.size()), shares(2 * p.W), places(5 * p.W) {}

    const uint8_t* run(const uint8_t* image, const int8_t* operations, const float* levels, int D) {
        std::memcpy(now.data(), image, p.size());
        for (int i = 0; i < D; ++i) apply(operations[i], levels[i]);
        return now.data();
    }

  private:
    void apply(int operation, double level) {
        const double size = std::fabs(level), sign = level < 0 ? -1 : 1;
        const double most[] = {0, 0, 4, 30, 256, 0.3, 0.3, p.W / 3.0, p.H / 3.0};
        if (operation < 0 || operation > TRANSLATE_Y) return;
        const double exact = size * most[operation] / 10;
        const int whole = static_cast<int>(exact), moved = static_cast<int>(sign) * whole;
        switch (operation) {
            case ROTATE: return turn(moved);
            case SHEAR_X: return map({1, sign * exact, 0, 0, 1, 0});
            case SHEAR_Y: return map({1, 0, 0, sign * exact, 1, 0});
            case TRANSLATE_X: return move(moved, 0);
            case TRANSLATE_Y: return move(0, moved);
            default: look_up(now.data(), p, operation, whole);
        }
    }

    void turn(int degrees) {
        if (!degrees) return;
        const double cosine = turns[2 * (degrees + 30)], sine = turns[2 * (degrees + 30) + 1];
        const double x = p.W / 2.0, y = p.H / 2.0;
        map({cosine, sine, cosine * -x + sine * -y + x, -sine, cosine, -sine * -x + cosine * -y + y});
    }

    void move(int by_x, int by_y) {
        if (!by_x && !by_y) return;
        translate(now.data(), next.data(), p, by_x, by_y);
        now.swap(next);
    }

    struct Matrix { double m[6]; };
    void map(Matrix matrix) {
        resample(now.data(), next.data(), p, matrix.m, shares.data(), places.data());
        now.swap(next);
    }

    Picture p;
    const double* turns;
    std::vector<uint8_t> now, next;
    std::vector<double> shares;
    std::vector<int> places;
};

}  // namespace

extern "C" {

// images [K, B, C, H, W], operations and levels [K, B, V, n, D], mix [K, B, V, 1 + n], turns [61, 2] to
// out [K, V, B, C, H, W] in [0, 1].
void augmix(int K, int B, int V, int n, int D, int C, int H, int W, const uint8_t* images, const int8_t* operations,
            const float* levels, const float* mix, const double* turns, float* out) {
    const Picture p{C, H, W};
    Chain chain(p, turns);
    for (int i = 0; i < K * B; ++i) {
        const uint8_t* image = images + static_cast<int64_t>(i) * p.size();
        for (int v = 0; v < V; ++v) {
            const int64_t view = static_cast<int64_t>(i) * V + v;
            const float* weights = mix + view * (1 + n);
            float* made = out + ((static_cast<int64_t>(i / B) * V + v) * B + i % B) * p.size();
            const float own = weights[0] / 255.0f;
            for (int j = 0; j < p.size(); ++j) made[j] = own * image[j];
            for (int k = 0; k < n; ++k) {
                const float weight = weights[1 + k] / 255.0f;
                const uint8_t* seen = chain.run(image, operations + (view * n + k) * D, levels + (view * n + k) * D, D);
                for (int j = 0; j < p.size(); ++j) made[j] += weight * seen[j];
            }
        }
    }
}
}

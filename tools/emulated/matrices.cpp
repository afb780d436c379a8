// Matrix instructions: a warp's by mma.sync and its matrices of shared memory, a warpgroup's by wgmma.
#include "fibers.h"

void load_matrices(unsigned *v, int count, unsigned from, bool transposed) {
    aligned_or_fail<16>(memory + from);
    current->given[0] = from;
    __syncwarp();
    const int lane = current->index.x % 32;
    for (int i = 0; i < count; ++i) {
        unsigned short pair[2];
        for (int e = 0; e < 2; ++e) {
            const int one = lane / 4, other = lane % 4 * 2 + e;
            const int row = transposed ? other : one, column = transposed ? one : other;
            memcpy(&pair[e], memory + lane_of(i * 8 + row)->given[0] + column * 2, 2);
        }
        v[i] = pair[0] | (unsigned)pair[1] << 16;
    }
    __syncwarp();
}
void store_matrices(unsigned to, const unsigned (&v)[4], bool transposed) {
    aligned_or_fail<16>(memory + to);
    current->given[0] = to;
    __syncwarp();
    const int lane = current->index.x % 32;
    for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) {
            const int one = lane / 4, other = lane % 4 * 2 + e;
            const int row = transposed ? other : one, column = transposed ? one : other;
            const unsigned short element = v[i] >> e * 16;
            memcpy(memory + lane_of(i * 8 + row)->given[0] + column * 2, &element, 2);
        }
    __syncwarp();
}

template <typename T> void multiply(float (&d)[4], int depth) {
    __syncwarp();
    const int lane = current->index.x % 32;
    auto element = [](unsigned word, int e) { return widen(T{(unsigned short)(word >> e * 16)}); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = d[i];
        for (int k = 0; k < depth; ++k) {
            const unsigned of_a = lane_of(row % 8 * 4 + k % 8 / 2)->given[row / 8 + k / 8 * 2];
            const unsigned of_b = lane_of(column * 4 + k % 8 / 2)->given[4 + k / 8];
            sum += element(of_a, k % 2) * element(of_b, k % 2);
        }
        d[i] = sum;
    }
    __syncwarp();
}
// m16n8k8 of tf32: the last 13 bits of a number do not count.
template <> void multiply<float>(float (&d)[4], int) {
    __syncwarp();
    const int lane = current->index.x % 32;
    auto element = [](unsigned word) { return __uint_as_float(word & ~0x1fffu); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8; ++k)
            d[i] += element(lane_of(row % 8 * 4 + k % 4)->given[row / 8 + k / 4 * 2]) *
                    element(lane_of(column * 4 + k % 4)->given[4 + k / 4]);
    }
    __syncwarp();
}
// Number e of four of A is of row e % 2 * 8 and those behind it, of B in each column.
template <typename T> void multiply_two_channels(float (&d)[4]) {
    __syncwarp();
    const int lane = current->index.x % 32;
    auto element = [](unsigned word, int e) { return widen(T{(unsigned short)(word >> e * 16)}); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int four = 0; four < 8; ++four)
            for (int e = 0; e < 2; ++e) {
                const int k = 4 * four + 2 * e + row / 8;
                const unsigned of_a = lane_of(row % 8 * 4 + four % 4)->given[row / 8 + four / 4 * 2];
                const unsigned of_b = lane_of(column * 4 + k % 8 / 2)->given[4 + k / 8];
                d[i] += element(of_a, e) * element(of_b, k % 2);
            }
    }
    __syncwarp();
}
template void multiply_two_channels<f16>(float (&d)[4]);
template void multiply_two_channels<bf16>(float (&d)[4]);
template void multiply<f16>(float (&d)[4], int depth);
template void multiply<bf16>(float (&d)[4], int depth);

static const char *wgmma_text = "";
static bool wgmma_bf16;
void set_wgmma(const char *text) { wgmma_text = text, wgmma_bf16 = strstr(text, "bf16"); }
// Element k of row `at` of an operand, whose rows run along gemm_k, or (`transposed`) lie across it.
inline float operand_element(unsigned long long descriptor, int at, int k, bool transposed) {
    const unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4, span = 256u >> (descriptor >> 62);
    const unsigned wide = span / 2;
    const unsigned place = transposed ? start + at / wide * leading + k / 8 * stride + k % 8 * span + at % wide * 2
                                      : start + at / 8 * stride + at % 8 * span + k * 2;
    unsigned short v;
    memcpy(&v, memory + (place ^ (place >> 7 & span / 16 - 1) << 4), 2);
    return wgmma_bf16 ? widen(bf16{v}) : widen(f16{v});
}
void wgmma_commit() { fiber().products.emplace_back(); }
void multiply_later(float *d, int sums, unsigned long long a, unsigned long long b, bool add) {
    if (!strstr(wgmma_text, "k16")) fail("operands have 16 bits here");
    fiber().products.back().push_back({d, sums, a, b, add});
}
void wait_for_multiplies(int pending) {
    const int lane = current->index.x % 32, warp = current->index.x / 32 % 4;
    // "p, 1, 1, A, B": which operands are transposed.
    const char *orders = strstr(wgmma_text, "p, 1, 1, ");
    const bool transposed_a = orders && orders[9] == '1', transposed_b = orders && orders[12] == '1';
    auto &groups = fiber().products;
    while ((int)groups.size() - 1 > pending) {
        for (const Product &product : groups.front())
            for (int high = 0; high < 2; ++high) {
                float row[16];
                for (int k = 0; k < 16; ++k)
                    row[k] = operand_element(product.a, warp * 16 + high * 8 + lane / 4, k, transposed_a);
                for (int i = 0; i < product.sums / 4; ++i)
                    for (int e = 0; e < 2; ++e) {
                        float &sum = product.d[4 * i + 2 * high + e];
                        if (!product.add) sum = 0;
                        for (int k = 0; k < 16; ++k)
                            sum += row[k] * operand_element(product.b, 8 * i + lane % 4 * 2 + e, k, transposed_b);
                    }
            }
        groups.erase(groups.begin());
    }
}

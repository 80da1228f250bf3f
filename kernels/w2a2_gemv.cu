// y[m, n] = f[n] sum_g s_w[n, g] s_x[m, g] sum_{k in g} (q_w[n, k] - z_w[n, g]) (q_x[m, k] - z_x[m, g]); see w2a2_gemv.py.
//
// Compiled once per configuration; the launcher defines:
//   G       groups of 32 columns                     TOKENS  1..4
//   X       type of x: 0 fp16, 1 bf16, 2 float32     READY   x is quantized beforehand: x_codes, x_scales, x_zeros
//   GATHER  columns of x by `index`                  REAL    zeros are float16, one a group
//   WARPS   of a block, which share the columns      TILES   of 16 rows, of a warp
//   BLOCKS  of an SM
//
// A group of codes is one word of a bit plane, and a binary mma of 16 rows x 256 columns gives, with a diagonal of words
// as operand B, the sums of 16 rows x 8 groups: nothing is unpacked. A warp takes 16 groups at a time, lane 4 g + t rows g
// and g + 8 and groups 4 t to 4 t + 3, which are 16 bytes of a plane, 4 bytes of scales and a byte of zeros. All of that
// is on its way before x is quantized, by the same warp, half a group a lane.
// The zero point of x needs no sum of codes: q - z = 2 (q1 - z1) + (q0 - z0) of the bits, and a bit less 1 is the
// negative of its complement. So a plane is complemented where its bit of z is 1, and its factor changes its sign.
#include "ptx.cuh"

constexpr u32 CHUNK = 16;                        // groups
constexpr u32 CHUNKS = (G + CHUNK - 1) / CHUNK;  // which the warps of a block take in turns
constexpr u32 ZERO_BYTES = (G + 3) / 4;          // of a row of zeros that are codes
constexpr bool WIDE = G % 4 == 0;                // every lane's groups are there together, and aligned
constexpr int ROWS = 16 * TILES;                 // of a block

struct Held { // what a lane has of a tile: rows g and g + 8, planes 0 and 1 of four groups, their scales and zeros
    uint4 word[2][2];
    u32 scale[2], zero[2][REAL ? 2 : 1];
};

INLINE u32 at(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

INLINE uint4 words_of(const u32 *p, u32 first, u64 policy) { // of four groups from `first` on, 0 behind the last one
    if (WIDE) return first < G ? load_past_l1(p, policy) : uint4{0, 0, 0, 0};
    return {first < G ? __ldg(p) : 0, first + 1 < G ? __ldg(p + 1) : 0, first + 2 < G ? __ldg(p + 2) : 0,
            first + 3 < G ? __ldg(p + 3) : 0};
}
INLINE u32 bytes_of(const unsigned char *p, u32 first) { // likewise, a byte a group
    if (WIDE) return first < G ? __ldg((const u32 *)p) : 0;
    u32 found = 0;
    UNROLL for (u32 i = 0; i < 4; i++)
        if (first + i < G) found |= (u32)__ldg(p + i) << 8 * i;
    return found;
}
INLINE u32 pair_of(const u16 *p, u32 first) { // likewise, two float16
    if (WIDE) return first < G ? __ldg((const u32 *)p) : 0;
    return (first < G ? __ldg(p) : 0) | (u32)(first + 1 < G ? __ldg(p + 1) : 0) << 16;
}

INLINE float from_e4m3(u32 four, int j) { // byte j, above 0, its exponent and mantissa being those of a small float
    const u32 bits = j < 3 ? four << 20 - 8 * j : four >> 4;
    return __uint_as_float(bits & 0x07F00000) * 0x1p120f;
}

struct Quantized { // half a group of a token: both planes of the whole group, scale and zero
    u32 plane0, plane1, zero;
    float scale;
};

// The least float whose quotient by s, rounded, is c or more: c s less half a unit in the last place of c, rounded up.
INLINE float threshold(float s, float c) {
    const float size = c < 0 ? -c : c, half = size > 2 ? 0x1p-23f : size > 1 ? 0x1p-24f : c < 0 ? 0x1p-25f : 0x1p-26f;
    return __fmaf_ru(s, c, -(s * half));
}

INLINE Quantized quantized(const float v[16], u32 lane) { // on the min-max grid that includes 0, as quantize_2bit does
    float low = 0, high = 0;
    UNROLL for (int i = 0; i < 16; i++) low = fminf(low, v[i]), high = fmaxf(high, v[i]);
    low = fminf(low, __shfl_xor_sync(~0u, low, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    Quantized q;
    q.scale = __fdiv_rn(high - low, 3.f);
    if (q.scale == 0) q.scale = 1;
    q.zero = 0;
    UNROLL for (int k = 0; k < 3; k++) q.zero += -low >= threshold(q.scale, 0.5f + k);
    const float first = 0.5f - (float)q.zero; // from which on the code is 1 or more
    const float one = threshold(q.scale, first), two = threshold(q.scale, first + 1), three = threshold(q.scale, first + 2);
    q.plane0 = q.plane1 = 0;
    UNROLL for (int i = 0; i < 16; i++) {
        const u32 a = v[i] >= one, b = v[i] >= two, c = v[i] >= three;
        q.plane0 |= (a ^ b ^ c) << i, q.plane1 |= b << i;
    }
    const u32 shift = 16 * (lane & 1);
    q.plane0 <<= shift, q.plane1 <<= shift;
    q.plane0 |= __shfl_xor_sync(~0u, q.plane0, 1), q.plane1 |= __shfl_xor_sync(~0u, q.plane1, 1);
    return q;
}

INLINE float value_of(const void *x, u64 i) {
    if (X == 2) return __ldg((const float *)x + i);
    return to_float<X == 1>(__ldg((const u16 *)x + i));
}

// The 16 columns of a lane, half of group `group`, of a token that begins at `start`; 0 where there are none.
INLINE void columns_of(float v[16], const void *x, const int *index, u64 start, u32 group, u32 lane, u32 K) {
    const u32 column = group * 32 + lane % 2 * 16;
    if (group >= G) {
        UNROLL for (int i = 0; i < 16; i++) v[i] = 0;
    } else if (GATHER) {
        UNROLL for (int i = 0; i < 16; i++) {
            const u32 from = __ldg(index + column + i);
            v[i] = from < K ? value_of(x, start + from) : 0;
        }
    } else {
        constexpr int EACH = X == 2 ? 4 : 8; // values of a load
        UNROLL for (int i = 0; i < 16 / EACH; i++) {
            const uint4 some = load_early((const char *)x + (start + column + i * EACH) * (16 / EACH));
            UNROLL for (int j = 0; j < EACH; j++)
                v[i * EACH + j] = X == 2 ? __uint_as_float(at(some, j)) : to_float<X == 1>(at(some, j / 2) >> 16 * (j % 2) & 0xFFFF);
        }
    }
}

struct Token { // of a lane's four groups: both planes, complemented by the zero point, and their factors
    u32 plane[2][4];
    float factor[2][4], sum[4]; // sum: of scale times codes less zero
};

INLINE void set(Token &token, int j, u32 plane0, u32 plane1, float scale, u32 zero) {
    token.sum[j] = scale * (float)((int)__popc(plane0) + 2 * (int)__popc(plane1) - 32 * (int)zero);
    token.plane[0][j] = zero & 1 ? ~plane0 : plane0;
    token.plane[1][j] = zero & 2 ? ~plane1 : plane1;
    token.factor[0][j] = zero & 1 ? -scale : scale;
    token.factor[1][j] = zero & 2 ? -2 * scale : 2 * scale;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
w2a2_gemv(const u32 *__restrict__ codes, const unsigned char *__restrict__ scales, const void *__restrict__ zeros,
          const float *__restrict__ factors, const void *__restrict__ x, const int *__restrict__ index,
          const u32 *__restrict__ x_codes, const float *__restrict__ x_scales, const int *__restrict__ x_zeros,
          void *__restrict__ y, u32 N, u32 K) {
    extern __shared__ __align__(128) char shared[]; // sums of every warp
    auto partial = (float (*)[TOKENS][ROWS])shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, base = blockIdx.x * ROWS;
    const u64 policy = evict_first();

    auto load = [&](Held *held, u32 chunk) {
        const u32 first = chunk * CHUNK + 4 * t;
        UNROLL for (int r = 0; r < TILES; r++)
            UNROLL for (int half = 0; half < 2; half++) {
                const u64 row = min(base + 16 * r + 8 * half + g, N - 1); // rows past the last one repeat it
                const u32 *words = codes + row * 2 * G + first;
                held[r].word[half][0] = words_of(words, first, policy);
                held[r].word[half][1] = words_of(words + G, first, policy);
                held[r].scale[half] = bytes_of(scales + row * G + first, first);
                if (REAL)
                    UNROLL for (int i = 0; i < (REAL ? 2 : 1); i++)
                        held[r].zero[half][i] = pair_of((const u16 *)zeros + row * G + first + 2 * i, first + 2 * i);
                else
                    held[r].zero[half][0] = first < G ? __ldg((const unsigned char *)zeros + row * ZERO_BYTES + first / 4) : 0;
            }
    };
    auto token_of = [&](Token &token, u32 m, u32 chunk) {
        const u32 first = chunk * CHUNK + 4 * t;
        if (READY) {
            const u64 row = (u64)m * G;
            UNROLL for (int j = 0; j < 4; j++) {
                const bool there = first + j < G;
                const u32 *words = x_codes + 2 * row + first + j;
                set(token, j, there ? __ldg(words) : 0, there ? __ldg(words + G) : 0,
                    there ? __ldg(x_scales + row + first + j) : 0, there ? (u32)__ldg(x_zeros + row + first + j) : 0);
            }
            return;
        }
        float v[16];
        columns_of(v, x, index, (u64)m * K, chunk * CHUNK + lane / 2, lane, K);
        const Quantized q = quantized(v, lane);
        UNROLL for (int j = 0; j < 4; j++) {
            const int from = 8 * t + 2 * j; // the lanes of the lane's group j
            auto word = [&](u32 mine) { return __float_as_uint(__shfl_sync(~0u, __uint_as_float(mine), from, 32)); };
            set(token, j, word(q.plane0), word(q.plane1), __shfl_sync(~0u, q.scale, from, 32), word(q.zero));
        }
    };

    float total[TILES][2][TOKENS] = {};
    auto compute = [&](const Held *held, u32 chunk) {
        UNROLL for (int m = 0; m < TOKENS; m++) {
            Token token;
            token_of(token, m, chunk);
            u32 b[2][2][2]; // of plane and pair of groups: the diagonal
            UNROLL for (int plane = 0; plane < 2; plane++)
                UNROLL for (int pair = 0; pair < 2; pair++) {
                    b[plane][pair][0] = g == 2 * t ? token.plane[plane][2 * pair] : 0;
                    b[plane][pair][1] = g == 2 * t + 1 ? token.plane[plane][2 * pair + 1] : 0;
                }
            UNROLL for (int r = 0; r < TILES; r++) {
                const Held &mine = held[r];
                UNROLL for (int pair = 0; pair < 2; pair++) {
                    int count[2][4]; // of x's planes: rows g, g + 8 times the two groups
                    UNROLL for (int plane = 0; plane < 2; plane++) {
                        int *c = count[plane];
                        UNROLL for (int i = 0; i < 4; i++) c[i] = 0;
                        UNROLL for (int upper = 1; upper >= 0; upper--) { // the weight's plane 1 counts twice
                            const uint4 &low = mine.word[0][upper], &high = mine.word[1][upper];
                            const u32 a[4] = {at(low, 2 * pair), at(high, 2 * pair), at(low, 2 * pair + 1),
                                              at(high, 2 * pair + 1)};
                            UNROLL for (int i = 0; i < 4; i++) c[i] += c[i];
                            count_common(c, a, b[plane][pair][0], b[plane][pair][1]);
                        }
                    }
                    UNROLL for (int i = 0; i < 4; i++) {
                        const int half = i / 2, j = 2 * pair + i % 2;
                        const float scale = from_e4m3(mine.scale[half], j);
                        const float zero = REAL ? half_to_float(mine.zero[half][j / 2 * (REAL != 0)] >> 16 * (j % 2) & 0xFFFF)
                                                : (float)(mine.zero[half][0] >> 2 * j & 3);
                        float sum = (float)count[0][i] * token.factor[0][j];
                        sum = __fmaf_rn((float)count[1][i], token.factor[1][j], sum);
                        sum = __fmaf_rn(-zero, token.sum[j], sum);
                        total[r][half][m] = __fmaf_rn(scale, sum, total[r][half][m]);
                    }
                }
            }
        }
    };

    Held held[TILES];
    u32 chunk = warp;
    if (chunk < CHUNKS) load(held, chunk);
    if (CHUNKS <= WARPS) {
        if (chunk < CHUNKS) compute(held, chunk);
    } else {
#pragma unroll 1
        for (; chunk < CHUNKS; chunk += WARPS) {
            Held next[TILES];
            if (chunk + WARPS < CHUNKS) load(next, chunk + WARPS);
            compute(held, chunk);
            UNROLL for (int r = 0; r < TILES; r++) held[r] = next[r];
        }
    }

    UNROLL for (int r = 0; r < TILES; r++)
        UNROLL for (int half = 0; half < 2; half++)
            UNROLL for (int m = 0; m < TOKENS; m++) {
                float sum = total[r][half][m];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (t == 0) partial[warp][m][16 * r + 8 * half + g] = sum;
            }
    __syncthreads();
    for (u32 i = threadIdx.x; i < TOKENS * ROWS; i += 32 * WARPS) {
        const u32 m = i / ROWS, row = base + i % ROWS;
        if (row >= N) continue;
        float sum = 0;
        UNROLL for (int w = 0; w < WARPS; w++) sum += partial[w][m][i % ROWS];
        sum *= __ldg(factors + row);
        const u64 to = (u64)m * N + row;
        if (READY || X == 2) ((float *)y)[to] = sum;
        else ((u16 *)y)[to] = to_half<X == 1>(sum);
    }
}

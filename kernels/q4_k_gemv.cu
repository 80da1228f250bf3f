// y = W x of one token for a weight in Q4_K in rows. Method: q4_k_gemv.py.
//
// Compile-time constants (-D). BF16 0 1 (else float16). Launch: WARPS of a thread block, which take its super-blocks in
// turn; TILES of 16 rows; STAGES super-blocks of all its rows that a warp has in flight; BLOCKS of an SM,
// which caps the registers; CLUSTER 1, or thread blocks that divide the super-blocks of rows and send each other their
// sums (compute capability 9.0 and later).
//
// Column n of operand B is nonzero for the inputs of sub-block n, so that one product has the sums of 16 rows for eight
// sub-blocks: nothing is wasted, and scales act once a sub-block. Lane 4 g + t holds sub-blocks 2 t (low nibbles) and
// 2 t + 1 (high ones of the same bytes) of rows g and g + 8, for which there are two products with one operand B.

#include "q4_k.cuh"

constexpr u32 SUPER = 256, ROWS = 16 * TILES, STEP = WARPS * CLUSTER;
constexpr u32 X_AT = TILES * BATCH, SLOT = X_AT + SUPER * 2;

// Converts a super-block of inputs to float16, in place, four neighbours as 0 2 1 3, which is the order of masked codes.
// bfloat16 is scaled by the power of two that brings the largest to 2^14 ... 2^15 (as wna16_gemv.cu). Returns the inverse
// of the power; `sums` are those of sub-blocks 2 t and 2 t + 1.
INLINE float arrange(char *x, u32 lane, float sums[2]) {
    auto own = (uint2 *)x + lane;
    u32 most = 0;
    UNROLL for (int i = 0; i < 2; i++)
        most = __vmaxu2(most, __vmaxu2(own[32 * i].x & 0x7FFF7FFF, own[32 * i].y & 0x7FFF7FFF));
    const Power power = BF16 ? power_of(most) : Power{1, 1};
    const float factor = power.factor;
    float quarter[2]; // sums of sub-blocks lane / 8 and 4 + lane / 8
    UNROLL for (int i = 0; i < 2; i++) {
        const u32 a = own[32 * i].x, b = own[32 * i].y;
        const float v[4] = {to_float<BF16>(a & 0xFFFF), to_float<BF16>(a >> 16), to_float<BF16>(b & 0xFFFF),
                            to_float<BF16>(b >> 16)};
        if (BF16)
            own[32 * i] = {to_halves<0>(v[0] * factor, v[2] * factor), to_halves<0>(v[1] * factor, v[3] * factor)};
        else
            own[32 * i] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)};
        quarter[i] = (v[0] + v[1]) + (v[2] + v[3]);
        UNROLL for (int mask = 1; mask < 8; mask *= 2) quarter[i] += __shfl_xor_sync(~0u, quarter[i], mask);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        const u32 from = lane % 2 * 16 + 8 * i;
        const float first = __shfl_sync(~0u, quarter[0], from, 32), second = __shfl_sync(~0u, quarter[1], from, 32);
        sums[i] = lane % 4 < 2 ? first : second;
    }
    __syncwarp();
    return power.inverse;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
q4_k_rows(const char *__restrict__ codes, const char *__restrict__ headers, const u16 *__restrict__ x,
          u16 *__restrict__ y, u32 N, u32 SUPERS) {
    extern __shared__ __align__(128) char shared[]; // sums of all warps, then their rings
    auto sums = (float (*)[ROWS])shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 part = blockIdx.x % CLUSTER, first = part * WARPS + warp; // super-block of the warp
    const u32 row = blockIdx.x / CLUSTER * ROWS, rows = N - 1 - row; // beyond the last row it is repeated, and dropped
    char *ring = shared + WARPS * ROWS * 4 + warp * STAGES * SLOT;
    const u64 policy = evict_first();
#if CLUSTER > 1
    __shared__ Joined<ROWS> joined;
    joined.begin(part);
#endif

    auto load = [&](u32 slot, u32 super) {
        const bool more = super < SUPERS;
        copy(slot + X_AT + lane * 16, x + super * SUPER + lane * 8, more, false);
        UNROLL for (u32 tile = 0; tile < TILES; tile++) {
            const u32 to = slot + tile * BATCH;
            u64 place = (u64)(row + min(tile * 16 + lane % 16, rows)) * SUPERS + super;
            copy_once(to + HEADERS_AT + lane * HEADER, headers + place * HEADER, policy, more && lane < LINES, false);
            UNROLL for (u32 i = 0; i < LINES; i += 4) { // eight lanes a line
                u32 line = i + lane / 8;
                place = (u64)(row + min(tile * 16 + line, rows)) * SUPERS + super;
                u32 piece = lane % 8 ^ line & 1;
                copy_once(to + line * LINE + piece * 16, codes + place * LINE + lane % 8 * 16, policy, more, false);
            }
        }
        end_of_copies();
    };

    const Bits bits(t >= 2);
    float total[TILES][2] = {}; // rows g and g + 8
    auto compute = [&](char *slot_pointer) {
        const u32 slot = shared_address(slot_pointer);
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        float x_sums[2];
        const float unit = arrange(slot_pointer + X_AT, lane, x_sums) * UNITS;
        uint4 b[4] = {}; // column g of operand B
        UNROLL for (int i = 0; i < 4; i++) load16_if(b[i], slot + X_AT + g * 64 + i * 16, t == g / 2);
        UNROLL for (int tile = 0; tile < TILES; tile++) {
            const u32 from = slot + tile * BATCH;
            float both[4] = {}, high[4] = {}; // sums of q + 16 q', and of 16 q'
            UNROLL for (u32 h = 0; h < 2; h++) {
                const u32 piece = (2 * t + h ^ g & 1) * 16;
                const uint4 p = load16(from + g * LINE + piece), q = load16(from + (g + 8) * LINE + piece);
                UNROLL for (int i = 0; i < 4; i++) {
                    const u32 p0 = word_of(p, i), q0 = word_of(q, i), p1 = upper_bytes(p0), q1 = upper_bytes(q0);
                    const u32 whole[4] = {lower_bytes(p0), lower_bytes(q0), p1, q1};
                    const u32 upper[4] = {high_nibbles(p0), high_nibbles(q0), high_nibbles(p1), high_nibbles(q1)};
                    const uint4 &pairs = b[2 * h + i / 2];
                    const u32 b0 = i % 2 ? pairs.z : pairs.x, b1 = i % 2 ? pairs.w : pairs.y;
                    mma<0>(both, whole, b0, b1);
                    mma<0>(high, upper, b0, b1);
                }
            }
            UNROLL for (u32 half = 0; half < 2; half++) {
                const uint4 header = load16(from + HEADERS_AT + (g + 8 * half) * HEADER);
                const u32 scales = bits.scales(header), minima = bits.minima(header), at = t % 2 * 2;
                const float first = both[2 * half] - high[2 * half], second = high[2 * half + 1] * (1.f / 16);
                const float product = byte_to_float(scales, at) * first + byte_to_float(scales, at + 1) * second;
                const float less = byte_to_float(minima, at) * x_sums[0] + byte_to_float(minima, at + 1) * x_sums[1];
                total[tile][half] += half_to_float(header.x) * unit * product - half_to_float(header.x >> 16) * less;
            }
        }
    };

    UNROLL for (u32 i = 0; i < STAGES; i++) load(shared_address(ring + i * SLOT), first + i * STEP);
    for (u32 super = first, at = 0; super < SUPERS; super += STEP) {
        compute(ring + at);
        __syncwarp();
        load(shared_address(ring + at), super + STAGES * STEP);
        at = at == (STAGES - 1) * SLOT ? 0 : at + SLOT;
    }

    UNROLL for (int tile = 0; tile < TILES; tile++)
        UNROLL for (int half = 0; half < 2; half++) {
            float sum = total[tile][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0) sums[warp][tile * 16 + half * 8 + g] = sum;
        }
    __syncthreads();
    auto sum_of = [&](u32 i) {
        float sum = 0;
        UNROLL for (int w = 0; w < WARPS; w++) sum += sums[w][i];
        return sum;
    };
    auto write = [&](u32 i, float sum) {
        if (i <= rows) y[row + i] = to_half<BF16>(sum);
    };
#if CLUSTER > 1
    joined.end(part, 32 * WARPS, sum_of, write);
#else
    for (u32 i = threadIdx.x; i < ROWS; i += 32 * WARPS) write(i, sum_of(i));
#endif
}

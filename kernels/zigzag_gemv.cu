// y = W x of one token for a weight in Q4_K in zigzag, all of its columns or some. Method: zigzag_gemv.py.
//
// Compile-time constants (-D). Problem: MODE 0 all columns, 1 the listed ones, 2 those above the threshold; ORDERED 0 1;
// BF16 0 1 (else float16). Launch: N2 warps of a program; STAGES batches of 16 columns that a warp has in flight; BLOCKS
// programs of an SM, which caps the registers; CLUSTER 1, or n1 thread blocks that send each other their sums (compute
// capability 9.0 and later); PROGRAMS 1, or n1 that post them in memory, all on the device at once. An argument: n1
// programs of a band of 256 rows.
//
// Row g of operand A has the low nibbles of piece g of the lines, 16 bytes of sub-blocks g / 2 * 2 (low nibbles) and the
// next (high ones), and row g + 8 the high nibbles; column n of operand B has x d scale of sub-block n. A byte of the
// piece is one product, of which the sums of row g with the columns of its two sub-blocks are used.

#include "q4_k.cuh"

constexpr int ALL = 0, LISTED = 1, MASKED = 2; // modes
constexpr u32 BAND = 256, NONE = ~0u; // NONE: no column
constexpr u32 STEP = N2 * LINES;                                          // from a batch of a warp to its next one
constexpr u32 OPERAND = 8 * LINES * 2, OWN = OPERAND + STAGES * BATCH; // bytes of a warp: operand B and its ring

extern "C" __global__ void __launch_bounds__(32 * N2, BLOCKS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
zigzag(const char *__restrict__ codes, const char *__restrict__ headers, const u16 *__restrict__ x,
       const int *__restrict__ active, u16 *__restrict__ y, float *parts, int *tickets, u32 N, u32 K, u32 n1,
       u32 threshold) {
    extern __shared__ __align__(128) char shared[]; // sums of all warps, then their rings
    __shared__ int last;
    auto sums = (float (*)[BAND])shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 band = blockIdx.x / n1, part = blockIdx.x % n1;
    const char *band_headers = kept(headers + (u64)band * K * HEADER);
    const char *band_codes = kept(codes + (u64)band * K * LINE + lane % 8 * 16);
    const u32 to_line = kept(lane / 8 * LINE + (lane % 8 ^ 2 * (lane / 8)) * 16);
    char *operand = shared + N2 * BAND * 4 + warp * OWN;
    const u32 ring = shared_address(operand) + OPERAND;
    const u64 policy = evict_first();
    const u32 exponent = kept(EXPONENT), from_line = kept(t * LINE + (g ^ 2 * t) * 16);
    const u32 count = MODE == LISTED ? __ldg(active) : K;
    const u32 first = count * part / n1 + warp * LINES, end = count * (part + 1) / n1;
    u32 left = first < end ? (end - first + STEP - 1) / STEP : 0; // batches of the warp
    // A lane has one column of a batch, of which it makes operand B for sub-blocks 0 to 3 or 4 to 7. Eight neighbours copy
    // four lines, and the first four of them, or the last, have their columns.
    const u32 mine = lane / 8 + lane % 4 * 4, half = lane / 4 % 2;
    u32 next = first + mine; // the lane's position in the next batch
#if CLUSTER > 1
    __shared__ Joined<BAND> joined;
    joined.begin(part);
#endif

    // The lane's column of the warp's next batch, or NONE. Dense ones are never NONE, but may be `end` or more.
    auto look = [&]() {
        const u32 at = next;
        next += STEP;
        if (MODE == ALL) return at;
        if (at >= end) return NONE;
        if (MODE == LISTED) return (u32)__ldg(active + 1 + at);
        return fabsf(to_float<BF16>(__ldg(x + at))) <= __uint_as_float(threshold) ? NONE : at;
    };
    // Copies the codes and headers of a batch into a slot, if it is `there`; the lane's input, 0 without a column, for
    // which a listed batch has any other.
    auto load = [&](u32 slot, u32 column, bool there) {
        const bool none = MODE == ALL ? column >= end : column == NONE;
        const u32 own = MODE != ALL && none ? 0 : column;
        const u32 input = there && !none ? __ldg(x + own) : 0;
        const bool first_half = there && half == 0;
        copy_once(slot + HEADERS_AT + mine * HEADER, band_headers + (u64)own * HEADER, policy, first_half, none);
        const u32 of_first_line = __shfl_sync(~0u, column, 0, 8); // its neighbours follow, if all columns are computed
        const char *from = band_codes + (u64)of_first_line * LINE;
        UNROLL for (u32 i = 0; i < LINES; i += 4) { // eight lanes a line
            bool skipped = MODE == ALL && of_first_line + i >= end;
            if (MODE != ALL) from = band_codes + (u64)__shfl_sync(~0u, own, i / 4, 8) * LINE - i * LINE;
            if (MODE == MASKED) skipped = __shfl_sync(~0u, column, i / 4, 8) == NONE;
            copy_once(slot + to_line + i * LINE, from + i * LINE, policy, there, skipped);
        }
        end_of_copies();
        return input;
    };

    const Bits bits(half);
    // Operand B lies in shared memory by pairs of sub-blocks, each with 16 words of a column, of which lanes 4 g + t read
    // those of columns t, t + 4, t + 8, t + 12.
    u32 *entries = (u32 *)operand + kept(2 * half * LINES + mine % 4 * 4 + mine / 4);
    const u32 at_pairs = kept((g / 2 * LINES + t * 4) * 4), of_pair = kept(g % 2 ? 0x7632 : 0x5410);
    float c[LINES][4] = {}, minima[4] = {}; // of byte m of the lane's piece; of the lane's sub-blocks
    // Operand B is x d scale times the power of two whose biased exponent is `power`; the first batch that is not zero
    // chooses it, and a batch with an x d too large for float16 (its bits are `limit` or more) makes it smaller.
    u32 power = 253, limit = 1;
    auto compute = [&](u32 slot, u32 input) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        const uint4 header = load16(slot + HEADERS_AT + mine * HEADER);
        const float value = to_float<BF16>(input);
        const float step = value * half_to_float(header.x), less = value * half_to_float(header.x >> 16);
        const u32 scales = bits.scales(header), own_minima = bits.minima(header);
        UNROLL for (int i = 0; i < 4; i++) minima[i] += less * byte_to_float(own_minima, i, exponent);
        const u32 most = __reduce_max_sync(~0u, __float_as_uint(fabsf(step)));
        if (most >= limit) {
            const u32 exponent = max(most >> 23, 8u), before = power;
            power = 255 - exponent, limit = exponent + 8 << 23; // x d becomes 2 ... 4 at most; 2^9 scales are too large
            const float change = __uint_as_float(power << 23) * __uint_as_float(254 - before << 23);
            UNROLL for (int m = 0; m < LINES; m++)
                UNROLL for (int i = 0; i < 4; i++) c[m][i] *= change;
        }
        const float factor = __uint_as_float(power << 23);
        const u32 steps = to_halves<0>(step * factor, step * factor);
        UNROLL for (int i = 0; i < 2; i++) { // scales as float16: the byte behind that of 1024, less 1024
            const u32 two = __byte_perm(scales, 0x64646464, i ? 0x4342 : 0x4140);
            entries[i * LINES] = multiply<0>(multiply_add<0>(two, 0x3C003C00, 0xE400E400), steps);
        }
        uint4 words[4];
        UNROLL for (u32 j = 0; j < 4; j++) words[j] = load16(slot + from_line + 4 * j * LINE);
        __syncwarp();
        const uint4 pairs = load16(shared_address(operand) + at_pairs);
        const u32 b0 = __byte_perm(pairs.x, pairs.y, of_pair), b1 = __byte_perm(pairs.z, pairs.w, of_pair);
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int two = 0; two < 2; two++) { // two bytes of each column's word
                const u32 selector = two ? 0x7632 : 0x5410;
                const u32 p = __byte_perm(word_of(words[0], i), word_of(words[1], i), selector);
                const u32 q = __byte_perm(word_of(words[2], i), word_of(words[3], i), selector);
                const u32 p0 = lower_bytes(p), q0 = lower_bytes(q), p1 = upper_bytes(p), q1 = upper_bytes(q);
                const u32 even[4] = {p0, high_nibbles(p), q0, high_nibbles(q)};
                const u32 odd[4] = {p1, high_nibbles(p1), q1, high_nibbles(q1)};
                mma<0>(c[4 * i + 2 * two], even, b0, b1);
                mma<0>(c[4 * i + 2 * two + 1], odd, b0, b1);
            }
    };

    u32 columns[STAGES + 1], inputs[STAGES]; // of the first batches; of those in flight
    UNROLL for (int i = 0; i <= STAGES; i++) columns[i] = look();
    UNROLL for (int i = 0; i < STAGES; i++) inputs[i] = load(ring + i * BATCH, columns[i], i < left);
    u32 column = columns[STAGES]; // of the next batch
    for (u32 at = 0; left; left--) {
        compute(ring + at, inputs[0]);
        __syncwarp();
        UNROLL for (int i = 0; i + 1 < STAGES; i++) inputs[i] = inputs[i + 1];
        inputs[STAGES - 1] = load(ring + at, column, left > STAGES);
        column = look();
        at = at == (STAGES - 1) * BATCH ? 0 : at + BATCH;
    }

    // Sums of the warp, by row: bytes of piece g are rows 64 (g / 2) + 16 (g % 2) and on, and those 32 after them.
    float ends[4]; // of this lane's sub-blocks 2 t and 2 t + 1: two of them
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int mask : {1, 2, 8, 16}) minima[i] += __shfl_xor_sync(~0u, minima[i], mask); // lanes of a half
        ends[i] = __shfl_sync(~0u, minima[i], t / 2 * 4, 32);
    }
    const float low = t % 2 ? ends[2] : ends[0], high = t % 2 ? ends[3] : ends[1];
    const float inverse = __uint_as_float(254 - power << 23);
    if (t == g / 2)
        UNROLL for (int m = 0; m < LINES; m += 4) { // four neighbours at once
            const u32 to = shared_address(&sums[warp][64 * t + 16 * (g % 2) + m]);
            float v[2][4];
            UNROLL for (int i = 0; i < 4; i++) {
                v[0][i] = (c[m + i][0] - c[m + i][2]) * UNITS * inverse - low;
                v[1][i] = c[m + i][3] * (UNITS / 16) * inverse - high;
            }
            UNROLL for (u32 i = 0; i < 2; i++) store16(to + 32 * 4 * i, float4{v[i][0], v[i][1], v[i][2], v[i][3]});
        }
    __syncthreads();
    auto sum_of = [&](u32 row) {
        float sum = 0;
        UNROLL for (int w = 0; w < N2; w++) sum += sums[w][row];
        return sum;
    };
    auto write = [&](u32 row, float sum) {
        if (band * BAND + row < N) y[band * BAND + row] = to_half<BF16>(sum);
    };

#if CLUSTER > 1
    joined.end(part, 32 * N2, sum_of, write);
    return;
#endif
#if PROGRAMS > 1
    post<PROGRAMS, BAND>((u32 *)parts + band * POSTS<PROGRAMS, BAND>, part, 32 * N2, (float *)shared, sum_of, write);
    return;
#endif

    // Sums of the program, then of the band by its last program.
    float *own_part = parts + (u64)(ORDERED ? blockIdx.x : band) * BAND;
    for (u32 row = threadIdx.x; row < BAND; row += 32 * N2) {
        const float sum = sum_of(row);
        if (n1 == 1) write(row, sum);
        else if (ORDERED) own_part[row] = sum;
        else atomicAdd(own_part + row, sum);
    }
    if (n1 == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(tickets + band, 1) == int(n1) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (u32 row = threadIdx.x; row < BAND; row += 32 * N2) {
        float sum = 0;
        if (ORDERED) {
            for (u32 i = 0; i < n1; i++) sum += __ldcg(parts + ((u64)band * n1 + i) * BAND + row);
        } else {
            sum = __ldcg(own_part + row);
            own_part[row] = 0; // for the next launch
        }
        write(row, sum);
    }
    if (threadIdx.x == 0) tickets[band] = 0;
}

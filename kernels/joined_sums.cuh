// The sums of a tile whose K the SPLIT thread blocks of a cluster share, for the sources of `w4a16_gemm` that multiply
// with `wgmma`. They have before it: SPLIT, BF16, NT (units of 8 tokens a warp), UNITS (of 16 rows and 8 tokens a block)
// and SLOTS (that a block adds up). A unit is added up by one block, in a fixed order.

// Sums of a tile of 8 NT tokens += W [64, 16] x^T [16, 8 NT] by a warpgroup: an instruction for each 160 tokens or fewer.
// FIRST: the sums are these products alone.
template <bool FIRST = false> INLINE void multiply_tile(float (&sum)[NT][4], const u32 *a, u64 x) {
    constexpr int PARTS = (NT + 19) / 20, PART = (NT + PARTS - 1) / PARTS, LAST = NT - (PARTS - 1) * PART;
    UNROLL for (int n = 0; n < NT - LAST; n += PART) wgmma<BF16, PART * 8, FIRST>(sum + n, a, x + n * 64);
    wgmma<BF16, LAST * 8, FIRST>(sum + NT - LAST, a, x + (NT - LAST) * 64);
}

// Where the blocks' sums of a warp's units go: to the block that adds up each, which knows by `landed` that all are there.
INLINE void land_sums(const float (&sum)[NT][4], u32 landing, u32 landed, int rank, int first, u32 warp, u32 lane) {
    UNROLL for (int n = 0; n < NT; n++) {
        const int unit = warp * NT + n;
        const u32 to = landing + (rank * SLOTS + unit / SPLIT) * 512 + lane * 16;
        const float4 v = {sum[n][0], sum[n][1], sum[n][2], sum[n][3]};
        if (unit % SPLIT == rank) store16(to, v);  // much faster than a send to this block itself
#if SPLIT > 1
        else send(to, v, landed, first + unit % SPLIT);
#endif
    }
}

// y[M, N] from row n0 and token m0 on: the totals of this block's units, by `warps` warps of which this is one.
INLINE void store_sums(u16* y, u32 landing, int rank, u32 warp, int warps, u32 lane, int m0, int n0, int M, int N) {
    for (u32 slot = warp; slot * SPLIT + rank < UNITS; slot += warps) {
        // Row 8 h + r, token 2 p + e of a unit is value 2 h + e of lane 4 r + p; a lane reads four rows of a token.
        const u32 unit = slot * SPLIT + rank, column = lane % 8, quad = lane / 8;
        const u32 from = landing + slot * 512 + quad % 2 * 256 + column / 2 * 16 + quad / 2 * 8 + column % 2 * 4;
        float parts[SPLIT][4], total[4] = {};
        UNROLL for (int v = 0; v < SPLIT * 4; v++) parts[v / 4][v % 4] = load4(from + v / 4 * SLOTS * 512 + v % 4 * 64);
        UNROLL for (int v = 0; v < SPLIT * 4; v++) total[v % 4] += parts[v / 4][v % 4];
        const uint2 four = {to_halves<BF16>(total[0], total[1]), to_halves<BF16>(total[2], total[3])};
        const int token = m0 + unit % NT * 8 + column, row = n0 + unit / NT * 16 + quad * 4;
        const int left = token < M ? N - row : 0;
        u16* to = y + (u64)token * N + row;
        if (left > 3 && N % 4 == 0) *(uint2*)to = four;
        else UNROLL for (int e = 0; e < 4; e++) if (e < left) to[e] = (&four.x)[e / 2] >> 16 * (e % 2);
    }
}

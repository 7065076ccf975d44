// AMX in software, included before a kernel's source so that its logic runs (and its accesses are checked by sanitizers) on
// processors without the instructions. Tiles are those of the program: up to 16 rows of up to 64 bytes.
#pragma once

#include <immintrin.h>
#include <cstdint>
#include <cstring>

// Products reach tiles alone, whose sizes load_config has checked, and are most of what a test computes.
#define FAKE_AMX_FAST __attribute__((optimize("O2"), no_sanitize("address", "undefined")))

namespace fake_amx {

struct Tile {
    uint16_t row_bytes;
    uint8_t rows;
    unsigned char data[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool configured = false;

inline void load_config(const void* p) {
    const unsigned char* bytes = (const unsigned char*)p;
    if (bytes[0] != 1) __builtin_trap();
    for (int t = 0; t < 8; t++) {
        std::memcpy(&tiles[t].row_bytes, bytes + 16 + 2 * t, 2);
        tiles[t].rows = bytes[48 + t];
        if (tiles[t].row_bytes > 64 || tiles[t].rows > 16) __builtin_trap();
    }
    configured = true;
}

inline void release() { configured = false; }

inline Tile& tile(int t) {
    if (!configured) __builtin_trap();
    return tiles[t];
}

inline void zero(int t) { std::memset(tile(t).data, 0, sizeof tile(t).data); }

inline void load(int t, const void* p, int64_t stride) {
    for (int r = 0; r < tile(t).rows; r++) std::memcpy(tiles[t].data[r], (const char*)p + r * stride, tiles[t].row_bytes);
}

inline void store(int t, void* p, int64_t stride) {
    for (int r = 0; r < tile(t).rows; r++) std::memcpy((char*)p + r * stride, tiles[t].data[r], tiles[t].row_bytes);
}

// The float32 with the upper half of the word, or with its lower half.
FAKE_AMX_FAST inline float upper(uint32_t word) {
    word &= 0xFFFF0000u;
    float x;
    __builtin_memcpy(&x, &word, 4);
    return x;
}
FAKE_AMX_FAST inline float lower(uint32_t word) { return upper(word << 16); }

// sums[m][n] += a[m][2 k] * b[k][2 n] + a[m][2 k + 1] * b[k][2 n + 1], k ascending
FAKE_AMX_FAST inline void dot(int sums, int a, int b) {
    if (!configured) __builtin_trap();
    for (int m = 0; m < tiles[sums].rows; m++)
        for (int k = 0; k < tiles[a].row_bytes / 4; k++) {
            uint32_t x, y;
            __builtin_memcpy(&x, tiles[a].data[m] + 4 * k, 4);
            for (int n = 0; n < tiles[sums].row_bytes / 4; n++) {
                float sum;
                __builtin_memcpy(&sum, tiles[sums].data[m] + 4 * n, 4);
                __builtin_memcpy(&y, tiles[b].data[k] + 4 * n, 4);
                sum += lower(x) * lower(y);
                sum += upper(x) * upper(y);
                __builtin_memcpy(tiles[sums].data[m] + 4 * n, &sum, 4);
            }
        }
}

// sums[m][n] += the four products of signed bytes at a[m][4 k] and b[k][4 n]
FAKE_AMX_FAST inline void dot_bytes(int sums, int a, int b) {
    if (!configured) __builtin_trap();
    for (int m = 0; m < tiles[sums].rows; m++)
        for (int n = 0; n < tiles[sums].row_bytes / 4; n++) {
            int32_t sum;
            __builtin_memcpy(&sum, tiles[sums].data[m] + 4 * n, 4);
            for (int k = 0; k < tiles[a].row_bytes; k++)
                sum += (int8_t)tiles[a].data[m][k] * (int8_t)tiles[b].data[k / 4][4 * n + k % 4];
            __builtin_memcpy(tiles[sums].data[m] + 4 * n, &sum, 4);
        }
}

}  // namespace fake_amx

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig fake_amx::load_config
#define _tile_release fake_amx::release
#define _tile_zero fake_amx::zero
#define _tile_loadd fake_amx::load
#define _tile_stored fake_amx::store
#define _tile_dpbf16ps fake_amx::dot
#define _tile_dpbssd fake_amx::dot_bytes

// What native.cpp asks for.
#define __builtin_cpu_supports(feature) 1
#define syscall(...) 0
#define _UNISTD_H 1

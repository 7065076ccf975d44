// The tile registers of AMX, eight of at most 16 rows of 64 bytes. Included where the target has them.
#pragma once

#include "common.h"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace amx {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

    void load() const {
        asm volatile("" ::"r"(this) : "memory");  // GCC's intrinsic names the first eight bytes alone as what it reads
        _tile_loadconfig(this);
    }
};

// A thread's tiles, configured for a number of rows. To configure and to release them takes as long as ten products.
class Tiles {
   public:
    ~Tiles() {
        if (rows) _tile_release();
    }

    // change(config) makes one for `wanted` rows of whole tiles.
    template <class Change>
    void use(int64_t wanted, const Change& change) {
        if (rows == wanted) return;
        TileConfig config;
        change(config);
        config.load();
        rows = wanted;
    }

   private:
    int64_t rows = 0;
};

}  // namespace amx
#pragma GCC pop_options

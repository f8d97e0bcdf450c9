// What reads keys and values in formats that are not plain, for attention.cpp. Compiled twice, for half of them each.

#include "attention_vectors.hpp"

#define KVLAB_HERE(Type, Number)                                                                               \
    template void score<Type, Number>(const Rows&, const Rows&, int, int, const Shape<Type>&, const float*, Scratch&); \
    template void add_values<Type, Number>(const Rows&, const Rows&, int, int, const Shape<Type>&, float*, Scratch&);

#if KVLAB_FORMATS == 0
KVLAB_HERE(Float32, int8_t)
KVLAB_HERE(BFloat16, int8_t)
KVLAB_HERE(Widened, int8_t)
KVLAB_HERE(Float32, E4M3)
KVLAB_HERE(BFloat16, E4M3)
KVLAB_HERE(Widened, E4M3)
#else
KVLAB_HERE(Float32, E5M2)
KVLAB_HERE(BFloat16, E5M2)
KVLAB_HERE(Widened, E5M2)
KVLAB_HERE(Float32, Int4)
KVLAB_HERE(BFloat16, Int4)
KVLAB_HERE(Widened, Int4)
#endif

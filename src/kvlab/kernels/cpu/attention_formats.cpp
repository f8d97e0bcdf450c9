// A library of its own: what reads keys and values in formats that are not plain. Two units share its work: KVLAB_FORMATS
// is 0 for half of the formats, and 1 for the other half and the table of all.

#include "attention_vectors.hpp"

#define KVLAB_READERS(EXTERN, Type, Number)                                                                            \
    EXTERN template void read_keys<Type, Number>(const Rows&, const Rows&, int, int, const Shape<Type>&, const float*, \
                                                 Scratch&);                                                            \
    EXTERN template void read_values<Type, Number>(const Rows&, const Rows&, int, int, const Shape<Type>&, float*,      \
                                                   Scratch&);
#define KVLAB_READERS_OF(EXTERN, Number)      \
    KVLAB_READERS(EXTERN, Float32, Number)    \
    KVLAB_READERS(EXTERN, BFloat16, Number)   \
    KVLAB_READERS(EXTERN, Widened, Number)

#if KVLAB_FORMATS == 0
KVLAB_READERS_OF(, int8_t)
KVLAB_READERS_OF(, E4M3)
#else
KVLAB_READERS_OF(extern, int8_t)
KVLAB_READERS_OF(extern, E4M3)
KVLAB_READERS_OF(, E5M2)
KVLAB_READERS_OF(, Int4)

template <class Type>
constexpr Readers<Type> readers_of() {
    return {{&read_keys<Type, int8_t>, &read_keys<Type, E4M3>, &read_keys<Type, E5M2>, &read_keys<Type, Int4>},
            {&read_values<Type, int8_t>, &read_values<Type, E4M3>, &read_values<Type, E5M2>, &read_values<Type, Int4>}};
}

// The functions, for kvlab_use_formats of the other library.
extern "C" const void* kvlab_format_readers() {
    static const FormatReaders readers = {readers_of<Float32>(), readers_of<BFloat16>(), readers_of<Widened>()};
    return &readers;
}
#endif

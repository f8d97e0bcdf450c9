// What the library has to say about itself: the instructions that it uses, and its interface.

#include "interface.hpp"
#include "tiles.hpp"

#include <cstddef>
#include <string>

namespace {

// A type as interface.py reads it: a letter, or the name of a structure.
template <class T>
struct TypeName;
template <class T>
struct TypeName<T*> {
    static constexpr const char* value = "p";
};
template <>
struct TypeName<const char*> {
    static constexpr const char* value = "s";
};
template <>
struct TypeName<void> {
    static constexpr const char* value = "v";
};
template <>
struct TypeName<int> {
    static constexpr const char* value = "i";
};
template <>
struct TypeName<int64_t> {
    static constexpr const char* value = "q";
};
template <>
struct TypeName<float> {
    static constexpr const char* value = "f";
};
#define NAME_STRUCTURE(name, fields)                 \
    template <>                                      \
    struct TypeName<name> {                          \
        static constexpr const char* value = #name; \
    };
KVLAB_STRUCTURES(NAME_STRUCTURE)

// Never inlined: a hundred copies of it would take seconds to compile.
__attribute__((noinline)) void append(std::string& text, const char* before, const char* word) {
    text += before;
    text += word;
}

__attribute__((noinline)) void append(std::string& text, const char* before, long number) {
    append(text, before, std::to_string(number).c_str());
}

template <class Result, class... Arguments>
void append_types(std::string& text, Result (*)(Arguments...)) {
    for (const char* name : {TypeName<Result>::value, TypeName<Arguments>::value...}) append(text, " ", name);
}

std::string describe() {
    std::string text;
#define DESCRIBE_CONSTANT(name, value) append(text, "\nconstant " #name " ", long(name));
    KVLAB_CONSTANTS(DESCRIBE_CONSTANT)
#define DESCRIBE_FIELD(type, name)                   \
    append(text, " " #name ":", TypeName<type>::value); \
    append(text, ":", long(offsetof(Described, name)));
#define DESCRIBE_STRUCTURE(name, fields)                          \
    {                                                             \
        using Described = name;                                   \
        append(text, "\nstructure " #name " ", long(sizeof(name))); \
        fields(DESCRIBE_FIELD)                                    \
    }
    KVLAB_STRUCTURES(DESCRIBE_STRUCTURE)
#define DESCRIBE_FUNCTION(name)                \
    append(text, "\nfunction " #name, ""); \
    append_types(text, name);
    KVLAB_FUNCTIONS(DESCRIBE_FUNCTION)
    return text.substr(1);
}

}  // namespace

// A line for each constant (name, value), structure (name, size, and each field's name:type:offset) and function (name,
// types of the result and of the arguments).
extern "C" const char* kvlab_interface() {
    static const std::string text = describe();
    return text.c_str();
}

// The instruction set, as far as the sources make a difference of it.
extern "C" const char* kvlab_instruction_set() {
#if defined(KVLAB_TILES)
    if (has_tiles()) return "avx512-bf16, amx";
#endif
#if defined(KVLAB_PAIRS)
    return PAIRS_NAME;
#else
    return FLOATS_NAME;
#endif
}

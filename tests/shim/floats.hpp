// 16-bit floats to and from float32, rounding to nearest even.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace floats {

inline float bits_to_float(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline uint32_t float_to_bits(float value) {
  uint32_t out;
  std::memcpy(&out, &value, 4);
  return out;
}

inline float from_bfloat(uint16_t value) { return bits_to_float((uint32_t)value << 16); }
inline uint16_t to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_half(uint16_t value) {
  const int exponent = (value >> 10) & 31, mantissa = value & 1023;
  const float size = exponent == 0    ? std::ldexp((float)mantissa, -24)
                     : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                      : std::ldexp((float)(1024 + mantissa), exponent - 25);
  return value & 0x8000 ? -size : size;
}
inline uint16_t to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00;
  if (size >= 65520.0f) return sign | 0x7C00;
  const int exponent = size < 6.103515625e-5f ? -14 : std::ilogb(size);
  const int steps = (int)std::nearbyint(std::ldexp(size, 10 - exponent));
  return sign | uint16_t(((exponent + 14) << 10) + steps);
}

}  // namespace floats

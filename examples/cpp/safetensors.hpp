// Reading safetensors files: eight bytes of length, a JSON header, the tensors' bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace safetensors {

struct Tensor {
  std::string dtype;  // "F32", "I64", ...
  std::vector<std::int64_t> shape;
  std::vector<char> bytes;
};

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::map<std::string, Tensor> read(const std::string& path) {
  const std::string data = read_text(path);
  std::uint64_t length = 0;
  if (data.size() < sizeof length) throw std::runtime_error(path + ": too short");
  std::memcpy(&length, data.data(), sizeof length);  // little-endian, as this code assumes
  if (length > data.size() - sizeof length) throw std::runtime_error(path + ": the header is cut");
  const auto header = nlohmann::json::parse(data.substr(sizeof length, length));
  const std::size_t begin = sizeof length + length;
  std::map<std::string, Tensor> found;
  for (const auto& [name, field] : header.items()) {
    if (name == "__metadata__") continue;
    Tensor tensor{field.at("dtype"), field.at("shape"), {}};
    const std::vector<std::uint64_t> offsets = field.at("data_offsets");
    if (offsets.size() != 2) throw std::runtime_error(path + ": " + name + ": expected two offsets");
    const auto first = offsets[0], last = offsets[1];
    if (first > last || last > data.size() - begin)
      throw std::runtime_error(path + ": " + name + " lies outside the file");
    tensor.bytes.assign(data.data() + begin + first, data.data() + begin + last);
    found[name] = std::move(tensor);
  }
  return found;
}

}  // namespace safetensors

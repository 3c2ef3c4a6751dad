// Runs the ONNX engine of a bundle with ONNX Runtime's C++ API, without Python, on the inputs that
// the bundle was verified on, and compares the outputs with eager's.
//
//   run_engine BUNDLE [LIMIT]
//
// LIMIT is the largest relative error of an output, 0.001 unless given.
// Exit codes: 0 all outputs agree, 1 one does not, 2 bad input.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <onnxruntime_cxx_api.h>

#include "safetensors.hpp"

namespace {

using Tensors = std::map<std::string, safetensors::Tensor>;

ONNXTensorElementDataType type_of(const std::string& dtype) {
  static const std::map<std::string, ONNXTensorElementDataType> types = {
      {"BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},    {"U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
      {"I8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},      {"I16", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16},
      {"I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},    {"I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
      {"F16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16},  {"BF16", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16},
      {"F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},    {"F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
  };
  const auto found = types.find(dtype);
  if (found == types.end()) throw std::runtime_error("unknown dtype " + dtype);
  return found->second;
}

double half_to_double(std::uint16_t bits) {
  const int sign = bits >> 15, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double value = 0;
  if (exponent == 31) value = fraction ? std::nan("") : HUGE_VAL;
  else if (exponent == 0) value = std::ldexp(fraction, -24);
  else value = std::ldexp(1024 + fraction, exponent - 25);
  return sign ? -value : value;
}

double bfloat_to_double(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <typename T>
std::vector<double> converted(const void* data, std::size_t count) {
  const T* values = static_cast<const T*>(data);
  return {values, values + count};
}

std::vector<double> doubles(ONNXTensorElementDataType type, const void* data, std::size_t count) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return converted<float>(data, count);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return converted<double>(data, count);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return converted<std::int64_t>(data, count);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return converted<std::int32_t>(data, count);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16: return converted<std::int16_t>(data, count);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return converted<std::int8_t>(data, count);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8: return converted<std::uint8_t>(data, count);
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: {
      const bool is_half = type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
      const auto* bits = static_cast<const std::uint16_t*>(data);
      std::vector<double> found(count);
      for (std::size_t i = 0; i < count; ++i)
        found[i] = is_half ? half_to_double(bits[i]) : bfloat_to_double(bits[i]);
      return found;
    }
    default: throw std::runtime_error("an output of an unknown type");
  }
}

// The L2 norm of the difference, relative to that of what is wanted.
double relative_error(const std::vector<double>& found, const std::vector<double>& wanted) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    difference += (found[i] - wanted[i]) * (found[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  if (difference == 0) return 0;
  return norm == 0 ? HUGE_VAL : std::sqrt(difference / norm);
}

// The file of the ONNX Runtime engine in a manifest.
std::string engine_file(const nlohmann::json& manifest) {
  for (const auto& engine : manifest.at("engines"))
    if (engine.at("target") == "onnxruntime") return engine.at("file");
  throw std::runtime_error("manifest.json: the bundle has no engine of onnxruntime");
}

std::vector<std::string> names(const nlohmann::json& specs) {
  std::vector<std::string> found;
  for (const auto& spec : specs) found.push_back(spec.at("name"));
  return found;
}

std::vector<const char*> pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> found;
  for (const std::string& text : texts) found.push_back(text.c_str());
  return found;
}

// The cases in a reference file, whose tensors are called CASE/in/INPUT and CASE/out/OUTPUT.
std::set<std::string> cases(const Tensors& reference) {
  std::set<std::string> found;
  for (const auto& one : reference) {
    const std::size_t place = one.first.find("/in/");
    if (place != std::string::npos) found.insert(one.first.substr(0, place));
  }
  return found;
}

class Engine {
 public:
  explicit Engine(const std::string& bundle)
      : manifest_(nlohmann::json::parse(safetensors::read_text(bundle + "/manifest.json"))),
        inputs_(names(manifest_.at("inputs"))),
        outputs_(names(manifest_.at("outputs"))),
        env_(ORT_LOGGING_LEVEL_ERROR, "enginecast") {
    Ort::SessionOptions options;
    // The last level crashes on some fp16 graphs on the CPU (ONNX Runtime 1.31).
    options.SetGraphOptimizationLevel(ORT_ENABLE_EXTENDED);
    // ONNX Runtime would turn stored int8 weights into products of int8, which were not verified.
    options.AddConfigEntry("optimization.disable_specified_optimizers",
                           "QDQSelectorActionTransformer");
    // The weights lie beside the engine, where its graph names them.
    session_ = Ort::Session(env_, (bundle + "/" + engine_file(manifest_)).c_str(), options);
  }

  const std::vector<std::string>& outputs() const { return outputs_; }

  // Runs a case; gives the outputs in their order.
  std::vector<Ort::Value> run(Tensors& reference, const std::string& name) {
    const Ort::MemoryInfo memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<Ort::Value> feeds;
    for (const std::string& input : inputs_) {
      const auto found = reference.find(name + "/in/" + input);
      if (found == reference.end()) throw std::runtime_error(name + ": lacks input " + input);
      safetensors::Tensor& tensor = found->second;  // ONNX Runtime reads it in place
      feeds.push_back(Ort::Value::CreateTensor(memory, tensor.bytes.data(), tensor.bytes.size(),
                                               tensor.shape.data(), tensor.shape.size(),
                                               type_of(tensor.dtype)));
    }
    const auto input_names = pointers(inputs_), output_names = pointers(outputs_);
    return session_.Run(Ort::RunOptions{nullptr}, input_names.data(), feeds.data(), feeds.size(),
                        output_names.data(), output_names.size());
  }

 private:
  nlohmann::json manifest_;
  std::vector<std::string> inputs_, outputs_;
  Ort::Env env_;
  Ort::Session session_{nullptr};
};

bool compare(const std::string& name, const std::string& output, Ort::Value& value,
             const safetensors::Tensor& wanted, double limit) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  if (info.GetShape() != wanted.shape) {
    std::cout << name << ": " << output << ": another shape than eager's\n";
    return false;
  }
  const std::size_t count = info.GetElementCount();
  const auto found = doubles(info.GetElementType(), value.GetTensorMutableData<char>(), count);
  const double error =
      relative_error(found, doubles(type_of(wanted.dtype), wanted.bytes.data(), count));
  const bool agrees = error <= limit;  // false for NaN, too
  std::cout << name << ": " << output << ": error " << error << (agrees ? "" : ", too large")
            << "\n";
  return agrees;
}

int run(const std::string& bundle, double limit) {
  Engine engine(bundle);
  Tensors reference = safetensors::read(bundle + "/reference.safetensors");
  bool agrees = true;
  std::size_t compared = 0;
  for (const std::string& name : cases(reference)) {
    std::vector<Ort::Value> values = engine.run(reference, name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::string& output = engine.outputs()[i];
      const auto wanted = reference.find(name + "/out/" + output);
      if (wanted == reference.end()) continue;  // large outputs are not stored
      agrees &= compare(name, output, values[i], wanted->second, limit);
      ++compared;
    }
  }
  if (compared == 0) throw std::runtime_error("reference.safetensors: holds no outputs");
  std::cout << compared << " outputs " << (agrees ? "agree" : "do not all agree") << " with eager\n";
  return agrees ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2 || count > 3) {
    std::cerr << "usage: run_engine BUNDLE [LIMIT]\n";
    return 2;
  }
  try {
    return run(arguments[1], count == 3 ? std::stod(arguments[2]) : 1e-3);
  } catch (const std::exception& error) {  // Ort::Exception, too
    std::cerr << "error: " << error.what() << "\n";
    return 2;
  }
}

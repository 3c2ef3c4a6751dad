// JSON, as far as manifests and the headers of safetensors files need it.
#pragma once

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace json {

struct Value {
  enum class Kind { null, boolean, number, text, array, object };

  Kind kind = Kind::null;
  double number = 0;  // also 0 or 1 for a boolean
  std::string text;
  std::vector<Value> items;
  std::map<std::string, Value> fields;

  const Value& at(const std::string& name) const {
    const auto found = fields.find(name);
    if (found == fields.end()) throw std::runtime_error("JSON: expected a field " + name);
    return found->second;
  }
};

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Value parse() {
    Value value = any(0);
    space();
    if (place_ != text_.size()) fail("expected the end");
    return value;
  }

 private:
  static constexpr int most_depth = 64;

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("JSON, byte " + std::to_string(place_) + ": " + what);
  }

  void space() {
    while (place_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[place_]))) ++place_;
  }

  char peek() const { return place_ < text_.size() ? text_[place_] : '\0'; }

  bool take(char wanted) {
    space();
    if (peek() != wanted) return false;
    ++place_;
    return true;
  }

  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("expected ") + wanted);
  }

  Value any(int depth) {
    if (depth > most_depth) fail("nested too deep");
    space();
    switch (peek()) {
      case '{': return object(depth);
      case '[': return array(depth);
      case '"': {
        Value value;
        value.kind = Value::Kind::text;
        value.text = string();
        return value;
      }
      case 't': return word("true", Value::Kind::boolean, 1);
      case 'f': return word("false", Value::Kind::boolean, 0);
      case 'n': return word("null", Value::Kind::null, 0);
      default: return number();
    }
  }

  Value word(const std::string& name, Value::Kind kind, double number) {
    if (text_.compare(place_, name.size(), name) != 0) fail("expected a value");
    place_ += name.size();
    Value value;
    value.kind = kind;
    value.number = number;
    return value;
  }

  Value number() {
    char* end = nullptr;
    Value value;
    value.kind = Value::Kind::number;
    value.number = std::strtod(text_.c_str() + place_, &end);
    if (end == text_.c_str() + place_) fail("expected a value");
    place_ = static_cast<std::size_t>(end - text_.c_str());
    return value;
  }

  Value object(int depth) {
    Value value;
    value.kind = Value::Kind::object;
    expect('{');
    if (take('}')) return value;
    do {
      space();
      std::string name = string();
      expect(':');
      value.fields[std::move(name)] = any(depth + 1);
    } while (take(','));
    expect('}');
    return value;
  }

  Value array(int depth) {
    Value value;
    value.kind = Value::Kind::array;
    expect('[');
    if (take(']')) return value;
    do value.items.push_back(any(depth + 1));
    while (take(','));
    expect(']');
    return value;
  }

  std::string string() {
    expect('"');
    std::string found;
    while (peek() != '"') {
      if (place_ >= text_.size()) fail("expected the end of a string");
      char one = text_[place_++];
      if (one == '\\') escaped(found);
      else found += one;
    }
    ++place_;
    return found;
  }

  void escaped(std::string& found) {
    const char one = peek();
    ++place_;
    switch (one) {
      case 'n': found += '\n'; return;
      case 't': found += '\t'; return;
      case 'r': found += '\r'; return;
      case 'b': found += '\b'; return;
      case 'f': found += '\f'; return;
      case '"': case '\\': case '/': found += one; return;
      case 'u': {
        if (place_ + 4 > text_.size()) fail("expected four digits");
        const unsigned long code = std::stoul(text_.substr(place_, 4), nullptr, 16);
        place_ += 4;
        // Names here are ASCII; of other characters the UTF-8 of their half is kept.
        if (code < 0x80) found += static_cast<char>(code);
        else if (code < 0x800) {
          found += static_cast<char>(0xC0 | (code >> 6));
          found += static_cast<char>(0x80 | (code & 0x3F));
        } else {
          found += static_cast<char>(0xE0 | (code >> 12));
          found += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
          found += static_cast<char>(0x80 | (code & 0x3F));
        }
        return;
      }
      default: fail("unknown escape");
    }
  }

  const std::string& text_;
  std::size_t place_ = 0;
};

inline Value parse(const std::string& text) { return Parser(text).parse(); }

}  // namespace json

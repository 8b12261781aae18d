// Errors as values: a Status says what went wrong in words a user can act on, a Result carries
// either a value or that Status. Nothing in the library prints, exits or throws.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace flashmoe {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // the call contradicts itself or its data; the message names argument, value,
                     // limit
  kUnsupported,      // legal, but nothing in this build or on this device does it; the message says
                     // what would
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}       // NOLINT: implicit by design
  Result(Status error) : content_(std::move(error)) {}  // NOLINT: implicit by design

  bool ok() const { return std::holds_alternative<T>(content_); }
  Status status() const { return ok() ? Status() : std::get<Status>(content_); }

  // Only after ok().
  T& value() { return std::get<T>(content_); }
  const T& value() const { return std::get<T>(content_); }

 private:
  std::variant<T, Status> content_;
};

}  // namespace flashmoe

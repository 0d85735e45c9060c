#pragma once
// A failure as plain bytes: made on the proxy thread without allocation, raised by Python as a typed exception.
#include <cstdio>

#include "abi/types.h"

namespace mk::host {

/// What failed. `number` is an errno value and 0 means no failure; `peer` is -1 where no peer is meant.
struct Error {
  i32 number = 0;
  i32 peer = -1;
  char call[40] = {};     ///< the function that refused: "ibv_post_send", "connect"
  char device[40] = {};   ///< NIC, port or interface: "mlx5_0/1", "eth0"; empty where none is meant
  char detail[176] = {};  ///< what errno does not say: a completion's status, offsets of a bad command

  explicit operator bool() const noexcept { return number != 0; }
};
static_assert(sizeof(Error) == 264, "mirrored by mkcompile.runtime.proxy.abi");

/// Where a failure happened.
struct Place {
  const char* call;
  const char* device = "";
  i32 peer = -1;
};

/// An error with its texts cut to size. `number` must not be 0: use EPROTO, EINVAL, ... where no call gave one.
template <class... Arguments>
inline Error fail(const Place& place, i32 number, const char* format = "", Arguments... arguments) noexcept {
  Error error;
  error.number = number;
  error.peer = place.peer;
  std::snprintf(error.call, sizeof error.call, "%s", place.call);
  std::snprintf(error.device, sizeof error.device, "%s", place.device);
  if constexpr (sizeof...(arguments) == 0) {
    std::snprintf(error.detail, sizeof error.detail, "%s", format);
  } else {
    std::snprintf(error.detail, sizeof error.detail, format, arguments...);
  }
  return error;
}

}  // namespace mk::host

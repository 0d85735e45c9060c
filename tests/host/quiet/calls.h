#pragma once
// Counts what proxy threads must not do. The program has its own malloc, pthread_mutex_lock, write, getenv and others,
// which the dynamic linker takes for all of the process; each looks at who calls and passes on.
#include <array>

#include "abi/types.h"

namespace mk::test {

enum Kind : u32 { kAllocation, kLock, kLog, kEnvironment, kFile, kKinds };

/// Threads that are made while it lives are proxies'.
struct MakesProxies {
  MakesProxies();
  ~MakesProxies();
};

/// What proxies do while it lives is counted; but not what a stand-in for a library of NICs does.
class Counted {
 public:
  Counted();
  ~Counted();
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  u64 of(Kind kind) const noexcept;
};

const char* name_of(Kind kind) noexcept;
/// Who was counted first, as `object+offset` for addr2line.
const char* first_caller() noexcept;

}  // namespace mk::test

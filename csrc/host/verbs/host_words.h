#pragma once
// Host memory that peers write beside the region: of each link whether the peer has left and how many receives it has
// posted again, then what our own messages say of themselves, and where those of the peers land.
#include <atomic>
#include <cstddef>
#include <vector>

#include "abi/types.h"

namespace mk::host::verbs {

/// The last piece of a message: the flag's value, and where the bytes went.
struct Note {
  u64 offset;
  u64 bytes;
  u32 value;
  u32 reserved;
};

/// Equal on all ranks but for the number of flags, so that offsets hold for the peers' words too.
class HostWords {
 public:
  HostWords(u32 links, u32 messages, u32 flags)
      : links_(links), messages_(messages),
        words_((links * sizeof(Line) + (std::size_t{messages} + flags) * sizeof(Note)) / sizeof(u64)) {}

  void* base() noexcept { return words_.data(); }
  u64 bytes() const noexcept { return words_.size() * sizeof(u64); }
  /// What `bytes()` is on a rank with so many flags.
  u64 bytes_with(u32 flags) const noexcept { return note_offset(messages_ + flags); }
  u64 address(u64 offset) const noexcept { return reinterpret_cast<u64>(words_.data()) + offset; }

  static u64 goodbye_offset(u32 link) noexcept { return link * sizeof(Line) + offsetof(Line, goodbye); }
  static u64 credit_offset(u32 link) noexcept { return link * sizeof(Line) + offsetof(Line, credit); }
  static u64 credit_out_offset(u32 link) noexcept { return link * sizeof(Line) + offsetof(Line, credit_out); }
  u64 staged_offset(u32 message) const noexcept { return note_offset(message); }
  u64 landing_offset(u32 slot) const noexcept { return note_offset(messages_ + slot); }

  u32 load(u64 offset) const noexcept {
    return std::atomic_ref<u32>(const_cast<u32&>(word(offset))).load(std::memory_order_acquire);
  }
  u32& word(u64 offset) noexcept { return *reinterpret_cast<u32*>(address(offset)); }
  const u32& word(u64 offset) const noexcept { return *reinterpret_cast<const u32*>(address(offset)); }
  Note& note(u64 offset) noexcept { return *reinterpret_cast<Note*>(address(offset)); }

 private:
  struct Line {
    u32 goodbye;     ///< written by the peer
    u32 credit;      ///< written by the peer: receives that it has posted again, from the start
    u32 credit_out;  ///< our own, for the peer
    u32 reserved;
  };
  u64 note_offset(u32 number) const noexcept { return links_ * sizeof(Line) + u64{number} * sizeof(Note); }

  const u32 links_, messages_;
  std::vector<u64> words_;
};

}  // namespace mk::host::verbs

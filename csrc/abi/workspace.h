#pragma once
// The symmetric workspace of one rank: a header, flag words, then two staging regions (one for each parity of the epoch).
// Every rank lays it out alike, so an offset is valid in all of them.
#include "abi/types.h"

namespace mk {

/// Ranks that one launch can reach by load and store.
inline constexpr u32 kMaxWorld = 16;

/// First words of a workspace; all zero before the first launch.
struct WorkspaceHeader {
  u32 epoch;       ///< launches that have finished here
  u32 blocks_in;   ///< blocks of the current launch that have entered
  u32 blocks_out;  ///< blocks of the current launch that have left
  u32 abort;       ///< non-zero: every wait gives up; stays set until the workspace is made anew
  u32 lost_peer;   ///< 1 + a rank whose copy engine goes on after its launch was given up, and may write too early
  u32 reserved[59];
  u64 entered[2][kMaxWorld];  ///< [parity of the epoch][source] epoch that this peer entered; above it, its identity
};
static_assert(sizeof(WorkspaceHeader) == 512, "flags start at byte 512");

/// Flag arrays behind the header: word [kind][source rank][tile index], each holding the epoch of its last event.
enum FlagKind : u32 {
  kPartialReady = 0,  ///< source has staged its partial of a tile that I own
  kPartialFree = 1,   ///< source, the owner, has consumed the partial that I staged there
  kFinalReady = 2,    ///< source, the owner, has sent the finished tile
  kFinalFree = 3,     ///< source has copied out the finished tile that I sent
  kImageFetched = 4,  ///< I have fetched an image of source's rows; no peer writes these, whichever launch it is in
  kFlagKinds = 5,
};

/// Why a launch gave up.
enum FaultCode : u32 {
  kNoFault = 0,
  kPeerTimeout = 1,   ///< a peer's flag did not come before the deadline
  kLaunchOrder = 2,   ///< the workspace was still in use by another launch
  kLocalStall = 3,    ///< a wait inside one block never ended; the kernel trapped
  kLaunchMismatch = 4,    ///< a peer has entered another launch; expected and seen are identities
  kReplayAfterFault = 5,  ///< a captured graph was replayed on a workspace that had failed with the code in `seen`
  kNetworkFault = 6,      ///< the host's proxy has stopped
  kPeerGaveUp = 7,        ///< a peer gave up a launch; what its copy engine did then may have spoilt rows of this one
};

/// Roles of the warps in one block, as fault reports name them.
/// Those of the network wait for a rail peer: their `peer` is its node.
enum Role : u32 {
  kLoadRole = 0,
  kComputeRole = 1,
  kStoreRole = 2,
  kSignalRole = 3,
  kCopyRole = 4,
  kEntry = 5,
  kNetSendRole = 6,
  kNetReceiveRole = 7,
  kNetEntry = 8,
};

/// Written by the device into host-mapped memory; `code` is written last.
struct FaultReport {
  u32 code;
  u32 op;
  u32 rank;
  u32 peer;
  u32 role;
  u32 tile;
  u32 expected;
  u32 seen;
  u64 waited_ns;
  u32 block;
  u32 thread;
};
static_assert(sizeof(FaultReport) == 48, "mirrored by mkcompile.runtime.abi");

}  // namespace mk

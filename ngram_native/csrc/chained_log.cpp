#include "chained_log.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace ngram {

namespace {
constexpr std::size_t kPageBytes = 4096;
}  // namespace

ChainedLog::ChainedLog(std::vector<Chain> chains, std::uint32_t capacity_pages,
                       std::uint32_t part_slots)
    : chains_(std::move(chains)),
      log_(capacity_pages, static_cast<std::uint32_t>(chains_.size())),
      part_slots_(part_slots),
      heads_(static_cast<std::uint32_t*>(std::calloc(num_heads(), sizeof(std::uint32_t)))) {
  if (!heads_) throw std::bad_alloc();
  touch_heads();
}

// The first write to a page costs microseconds, and tokens write all over the table. So its pages
// are touched now, large ones where there are any, and not in the middle of a step.
void ChainedLog::touch_heads() {
  const std::size_t bytes = num_heads() * sizeof(std::uint32_t);
#ifdef __linux__
  const auto begin = reinterpret_cast<std::uintptr_t>(heads_.get());
  const std::uintptr_t inside = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::uintptr_t end = (begin + bytes) / kPageBytes * kPageBytes;
  // Only advice: it changes nothing but time.
  if (inside < end) ::madvise(reinterpret_cast<void*>(inside), end - inside, MADV_HUGEPAGE);
#endif
  volatile std::byte* const memory = reinterpret_cast<std::byte*>(heads_.get());
  for (std::size_t at = 0; at < bytes; at += kPageBytes) memory[at] = std::byte{0};
}

std::size_t ChainedLog::num_parts(const std::vector<Chain>& chains) {
  const bool groups =
      std::any_of(chains.begin(), chains.end(), [](const Chain& chain) { return chain.per_group; });
  return chains.size() + (groups ? 1 : 0);
}

std::uint32_t ChainedLog::part_slots_for(const std::vector<Chain>& chains, std::uint64_t bytes) {
  const std::uint64_t slots = bytes / sizeof(Position) / num_parts(chains);
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(slots, 16, 1u << 28));
}

std::uint64_t ChainedLog::table_bytes(const std::vector<Chain>& chains, std::uint32_t part_slots) {
  return std::uint64_t{part_slots} * num_parts(chains) * sizeof(Position);
}

PageNumber ChainedLog::begin_page(Cursor& cursor, std::uint32_t policy) {
  const bool continues = cursor.page != kNoPage && log_.alive(cursor.page);
  const Position parent = log_.holds(cursor.last) ? cursor.last : kNoPosition;
  const PageNumber page = log_.begin_page(PageHeader{.group = cursor.group,
                                                     .parent = parent,
                                                     .next = kNoPage,
                                                     .number = 0,
                                                     .policy = policy,
                                                     .sibling = kNoPosition,
                                                     .used = 0,
                                                     .has_group = cursor.has_group,
                                                     .starts_segment = !continues});
  // The new page may have taken the slot of the one it continues.
  if (continues && log_.alive(cursor.page)) log_.header(cursor.page).next = page;
  if (!continues && cursor.has_group) {
    log_.header(page).sibling =
        exchange_head(segment_slot(cursor.group, parent), page * kPageTokens);
  }
  cursor.page = page;
  return page;
}

void ChainedLog::append(Cursor& cursor, Token token, ContextView context, std::uint32_t policy) {
  PageNumber page = cursor.page;
  if (page == kNoPage || !log_.alive(page) || log_.header(page).used == kPageTokens) {
    page = begin_page(cursor, policy);
  }
  const Position position = log_.push(page, token);
  cursor.last = position;
  for (std::uint32_t which = 0; which < chains_.size(); ++which) {
    log_.link(position, which) = links(chains_[which], cursor, context)
                                     ? exchange_head(slot(which, context, cursor.group), position)
                                     : kNoPosition;
  }
}

void ChainedLog::prefetch_append(const Cursor& cursor, ContextView context) const {
  for (std::uint32_t which = 0; which < chains_.size(); ++which) {
    if (links(chains_[which], cursor, context)) {
      __builtin_prefetch(&heads_[slot(which, context, cursor.group)], 1);
    }
  }
}

std::size_t ChainedLog::follow(Cursor& cursor, std::span<const Token> tokens) const {
  // Depth first over the tree of segments: along a segment to its end, then from the deepest
  // position at which another one branches off.
  struct Branch {
    Position last;     // segments that follow this token
    std::size_t held;  // tokens up to this one, included
  };
  std::vector<Branch> branches = {{kNoPosition, 0}};
  std::size_t longest = 0;
  std::size_t compared = 0;
  while (!branches.empty() && longest < tokens.size() && compared < kMaxFollowed) {
    const Branch branch = branches.back();
    branches.pop_back();
    Position start = head(segment_slot(cursor.group, branch.last));
    for (std::uint32_t step = 0; step < kMaxSegments && log_.holds(start); ++step) {
      const PageHeader& page = log_.header(start / kPageTokens);
      // Else the head is of a page number long ago.
      if (start % kPageTokens != 0 || !page.starts_segment) break;
      std::size_t held = branch.held;
      if (page.has_group && page.group == cursor.group && page.parent == branch.last) {
        for (Position p = start;
             p != kNoPosition && held < tokens.size() && log_.token(p) == tokens[held];
             p = log_.after(p)) {
          branches.push_back({p, ++held});
          if (held > longest) {
            longest = held;
            cursor.last = p;
          }
        }
      }
      compared += held - branch.held + 1;
      start = page.sibling;
    }
  }
  return longest;
}

std::uint32_t ChainedLog::match_length(PageView page, std::uint32_t offset,
                                       ContextView context) const {
  const Token* said = context.end();
  std::uint32_t left = context.size();
  while (true) {
    const Token* token = page.tokens() + offset;
    const Token* const stop = token - std::min(offset, left);
    left -= static_cast<std::uint32_t>(token - stop);
    while (token != stop && token[-1] == said[-1]) {
      --token;
      --said;
    }
    if (token != stop || left == 0) break;
    const Position parent = page.header().parent;
    if (!log_.holds(parent)) break;
    page = log_.view(parent / kPageTokens);
    offset = parent % kPageTokens + 1;
  }
  return static_cast<std::uint32_t>(context.end() - said);
}

bool ChainedLog::prefetch(Position position, std::uint32_t which) const {
  if (!log_.may_hold(position)) return false;
  const PageView page = log_.view(position / kPageTokens);
  const std::uint32_t offset = position % kPageTokens;
  __builtin_prefetch(&page.header());
  __builtin_prefetch(page.tokens() + offset);
  __builtin_prefetch(page.link(offset, which));
  return true;
}

std::string ChainedLog::check(std::int64_t vocab_size) const {
  std::uint64_t tokens = 0;
  for (std::uint32_t slot = 0; slot < log_.num_pages(); ++slot) {
    const PageHeader& header = log_.header_of_slot(slot);
    const PageNumber page = header.number;
    const std::string name = "page " + std::to_string(page) + ": ";
    if (!log_.lies_in(page, slot)) return name + "lies in slot " + std::to_string(slot);
    if (header.used == 0 || header.used > kPageTokens) {
      return name + "holds " + std::to_string(header.used) + " tokens";
    }
    if (header.next != kNoPage) {
      if (header.used != kPageTokens) return name + "continues before it is full";
      if (!log_.alive(header.next)) return name + "continues in a page that is gone";
      const PageHeader& next = log_.header(header.next);
      if (next.parent != page * kPageTokens + kPageTokens - 1 || next.starts_segment) {
        return name + "its continuation does not lead back to it";
      }
    }
    for (std::uint32_t offset = 0; offset < header.used; ++offset) {
      const Token token = log_.view(page).tokens()[offset];
      if (token < 0 || token >= vocab_size) {
        return name + "holds token " + std::to_string(token) + ", which is not in [0, " +
               std::to_string(vocab_size) + ")";
      }
    }
    tokens += header.used;
  }
  if (tokens != log_.num_tokens()) {
    return "the pages hold " + std::to_string(tokens) + " tokens, the count says " +
           std::to_string(log_.num_tokens());
  }
  return {};
}

}  // namespace ngram

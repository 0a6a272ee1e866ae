#include "context_sorter.h"

#include <algorithm>
#include <array>
#include <utility>

namespace ngram {

namespace {

constexpr std::size_t kInsertion = 24;    // below: insertion sort
constexpr std::size_t kAhead = 16;        // items whose keys are being fetched
constexpr std::size_t kComparison = 256;  // below: comparisons cost less than counting bytes

}  // namespace

ContextSorter::ContextSorter(const Token* text, MappedArray<TextPosition>& order,
                             MappedArray<std::uint8_t>& shared, BuildMonitor& monitor)
    : text_(text),
      order_(order),
      shared_(shared),
      monitor_(monitor),
      positions_(order.size() > kMaxRecords ? order.size() : 0),
      records_(std::min(order.size(), kMaxRecords)),
      more_records_(records_.size()) {}

std::uint64_t ContextSorter::scratch_bytes(std::size_t num_positions) {
  const std::size_t records = std::min(num_positions, kMaxRecords);
  return MappedArray<TextPosition>::bytes_for(num_positions > kMaxRecords ? num_positions : 0) +
         2 * MappedArray<Record>::bytes_for(records);
}

void ContextSorter::sort() {
  if (order_.size() == 0) return;
  shared_[0] = 0;
  refine(0, order_.size(), 0);
  monitor_.set_indexed(order_.size());
}

std::uint8_t ContextSorter::common(std::uint64_t a, std::uint64_t b, std::uint32_t depth) {
  if (a >> 32 != b >> 32 || a >> 32 == 0) return static_cast<std::uint8_t>(depth);
  const bool second = a == b && static_cast<std::uint32_t>(a) != 0;
  return static_cast<std::uint8_t>(depth + 1 + second);
}

bool ContextSorter::is_last(std::uint64_t key, std::uint32_t depth) {
  return static_cast<std::uint32_t>(key) == 0 || depth + 2 == kMaxMatch;
}

void ContextSorter::finish(std::uint64_t positions) {
  finished_ += positions;
  if (finished_ - reported_ < BuildMonitor::kStride) return;
  reported_ = finished_;
  monitor_.set_indexed(finished_);
}

void ContextSorter::refine(std::size_t begin, std::size_t end, std::uint32_t depth) {
  if (end - begin == 2) return order_pair(begin, depth);
  if (end - begin <= kMaxRecords) {
    sort_records(begin, end, depth);
  } else {
    sort_positions(begin, end, depth);
  }
  for (std::size_t i = begin; i < end;) {
    std::size_t group_end = i + 1;
    while (group_end < end && shared_[group_end] == kUndecided) ++group_end;
    if (group_end - i > 1) {
      refine(i, group_end, depth + 2);
    } else {
      finish(1);
    }
    i = group_end;
  }
}

void ContextSorter::order_pair(std::size_t begin, std::uint32_t depth) {
  const Token* first = text_ + order_[begin] - 1;
  const Token* second = text_ + order_[begin + 1] - 1;
  std::uint32_t common = depth;
  while (common < kMaxMatch && *(first - common) == *(second - common) && *(first - common) >= 0) {
    ++common;
  }
  if (common < kMaxMatch && *(second - common) < *(first - common)) {
    std::swap(order_[begin], order_[begin + 1]);
  }
  shared_[begin + 1] = static_cast<std::uint8_t>(common);
  finish(2);
}

// Stable: least significant byte first, leaving out the bytes in which all keys agree. Returns
// where the sorted items ended up.
template <typename Item, typename KeyOf, typename Prefetch>
Item* ContextSorter::radix_sort(Item* items, Item* scratch, std::size_t size, KeyOf key_of,
                                Prefetch prefetch) {
  std::array<std::array<std::uint32_t, 256>, 8> counts{};
  const std::uint64_t first = key_of(items[0]);
  std::uint64_t varying = 0;
  for (std::size_t i = 0; i < size; ++i) {
    checkpoint(i);
    prefetch(items[std::min(i + kAhead, size - 1)]);
    const std::uint64_t key = key_of(items[i]);
    varying |= key ^ first;
    for (std::size_t byte = 0; byte < 8; ++byte) ++counts[byte][key >> 8 * byte & 0xFF];
  }
  for (std::size_t byte = 0; byte < 8; ++byte) {
    if ((varying >> 8 * byte & 0xFF) == 0) continue;
    std::uint32_t sum = 0;
    for (std::uint32_t& count : counts[byte]) sum += std::exchange(count, sum);
    for (std::size_t i = 0; i < size; ++i) {
      checkpoint(i);
      prefetch(items[std::min(i + kAhead, size - 1)]);
      scratch[counts[byte][key_of(items[i]) >> 8 * byte & 0xFF]++] = items[i];
    }
    std::swap(items, scratch);
  }
  return items;
}

void ContextSorter::sort_records(std::size_t begin, std::size_t end, std::uint32_t depth) {
  const std::size_t size = end - begin;
  Record* records = records_.data();
  for (std::size_t i = 0; i < size; ++i) {
    // Beyond the group: the next one comes soon.
    prefetch(order_[std::min(begin + i + kAhead, order_.size() - 1)], depth);
    const TextPosition position = order_[begin + i];
    records[i] = Record{key(position, depth), position};
  }
  if (size < kInsertion) {
    for (std::size_t i = 1; i < size; ++i) {
      const Record record = records[i];
      std::size_t j = i;
      for (; j > 0 && record.key < records[j - 1].key; --j) records[j] = records[j - 1];
      records[j] = record;
    }
  } else if (size < kComparison) {
    std::sort(records, records + size, [](const Record& a, const Record& b) {
      return a.key != b.key ? a.key < b.key : a.position < b.position;
    });
  } else {
    records = radix_sort(
        records, more_records_.data(), size, [](const Record& record) { return record.key; },
        [](const Record&) {});
  }
  order_[begin] = records[0].position;
  for (std::size_t i = 1; i < size; ++i) {
    order_[begin + i] = records[i].position;
    const std::uint64_t a = records[i - 1].key, b = records[i].key;
    shared_[begin + i] = a == b && !is_last(b, depth) ? kUndecided : common(a, b, depth);
  }
}

void ContextSorter::sort_positions(std::size_t begin, std::size_t end, std::uint32_t depth) {
  TextPosition* const group = order_.data() + begin;
  const TextPosition* sorted = radix_sort(
      group, positions_.data(), end - begin,
      [this, depth](TextPosition position) { return key(position, depth); },
      [this, depth](TextPosition position) { prefetch(position, depth); });
  if (sorted != group) std::copy(sorted, sorted + (end - begin), group);
  std::uint64_t a = key(group[0], depth);
  for (std::size_t i = 1; i < end - begin; ++i) {
    checkpoint(i);
    prefetch(group[std::min(i + kAhead, end - begin - 1)], depth);
    const std::uint64_t b = key(group[i], depth);
    shared_[begin + i] = a == b && !is_last(b, depth) ? kUndecided : common(a, b, depth);
    a = b;
  }
}

}  // namespace ngram

//! Node names in the order in which requests bring them, so that much of a request is recognised by comparing long stretches of
//! it with the roll, and the rest is looked up close to what was looked up before.
//!
//! kube-scheduler goes through its list of nodes round and round. Where the list was filled by a watch (1.35 and later) it is in
//! no order that anybody else knows, but it stays as it is until kube-scheduler starts anew. On several processors its workers go
//! through a piece of the list each, and a request has their names shuffled into each other.

use std::hash::Hasher;

use placement::{Fleet, NodeId};
use rustc_hash::FxHasher;

/// How many names there may be besides twice as many as the fleet has; then all are forgotten.
const SPARE: usize = 4096;

/// No node.
const NOWHERE: u32 = u32::MAX;

/// How many bytes are compared at once.
const STRETCH: usize = 64;

/// The longest name that a node can have, in bytes (Kubernetes: a DNS subdomain); longer ones are not kept.
const LONGEST: usize = 253;

/// So many names in the order of the roll are taken for the beginning of a longer run. Where workers take turns runs are short,
/// and looking for the end of each would cost more than it saves.
const STEADY: u32 = 3;

/// In how many places a name may be looked for; a name that has no room in them is not kept.
const PROBES: usize = 16;

/// Names, and where they are in the fleet.
#[derive(Clone, Debug, Default)]
pub(super) struct Roll {
    /// All names in quotes, with a comma behind each.
    text: Vec<u8>,
    entries: Vec<Entry>,
    /// Where names are: one that has a hash is in the bucket that its lower half says or in one of the next.
    buckets: Vec<u32>,
    /// All places, in the order of the names.
    by_name: Vec<u32>,
    /// That of the fleet's names when nodes were looked up.
    version: u64,
}

/// What is known of one name: as little as goes into a quarter of what a processor reads at a time.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The upper half of the name's hash.
    hash: u32,
    /// Where its closing quote is in the text.
    end: u32,
    known: Known,
}

/// What is known of a name that is on the roll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    /// The place of the node in the fleet; `NOWHERE` if it is not there.
    index: u32,
    /// How many names on the roll come before it by their letters.
    pub(super) rank: u32,
}

/// Names of a request that follow each other on the roll too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run<'r> {
    /// What is known of each.
    entries: &'r [Entry],
    /// Where the first begins on the roll.
    begin: u32,
    /// Its place.
    place: u32,
}

/// Reads the names of one request off a roll.
#[derive(Debug)]
pub(super) struct Reader<'r> {
    roll: &'r Roll,
    /// The place of the name that comes after the last one.
    next: u32,
    /// How many names have come in the order of the roll, as far as that is counted.
    n_steady: u32,
}

impl Known {
    /// Of a name that is not on the roll nothing is known.
    pub(super) const STRANGER: Self = Self {
        index: NOWHERE,
        rank: u32::MAX,
    };

    fn of(node: Option<NodeId>) -> Self {
        Self {
            index: node.map_or(NOWHERE, NodeId::index),
            rank: 0,
        }
    }

    /// The place of the node in the fleet, if it is there.
    #[inline]
    pub(super) fn index(self) -> Option<u32> {
        (self.index != NOWHERE).then_some(self.index)
    }
}

impl Run<'_> {
    /// Where the closing quote of each name is, if the first begins at this offset.
    pub(super) fn ends(&self, offset: u32) -> impl Iterator<Item = u32> {
        self.entries
            .iter()
            .map(move |entry| entry.end - self.begin + offset)
    }

    /// What is known of each name.
    pub(super) fn known(&self) -> impl Iterator<Item = Known> {
        self.entries.iter().map(|entry| entry.known)
    }
}

impl<'r> Reader<'r> {
    /// A reader that expects a request to begin as the roll does.
    pub(super) fn of(roll: &'r Roll) -> Self {
        Self {
            roll,
            next: 0,
            n_steady: STEADY,
        }
    }

    /// The names with which a text begins, as far as they follow the last one as they do on the roll; `None` if none does, or
    /// if such runs have been short.
    #[inline]
    pub(super) fn run(&mut self, text: &[u8]) -> Option<Run<'r>> {
        if self.n_steady < STEADY {
            None
        } else {
            self.long_run(text)
        }
    }

    #[inline(never)]
    fn long_run(&mut self, text: &[u8]) -> Option<Run<'r>> {
        self.n_steady = 0;
        let run = self.roll.run(self.next, text)?;
        let last = run.place + u32::try_from(run.entries.len()).ok()? - 1;
        self.n_steady = STEADY;
        self.next = self.roll.after(last);
        Some(run)
    }

    /// What is known of a name.
    #[inline]
    pub(super) fn find(&mut self, name: &[u8]) -> Option<Known> {
        let (place, entry) = self.roll.find(hash(name), name)?;
        self.n_steady = if place == self.next { self.n_steady + 1 } else { 0 };
        self.next = self.roll.after(place);
        Some(entry.known)
    }
}

impl Roll {
    /// The place of a name with this hash, and what is known of it.
    #[inline]
    fn find(&self, hash: u64, name: &[u8]) -> Option<(u32, Entry)> {
        for bucket in self.probes(hash) {
            let place = *self.buckets.get(bucket)?;
            // Behind a bucket that is free there is none of this name.
            let entry = *self.entries.get(place as usize)?;
            if entry.hash == upper(hash) && self.name(place) == Some(name) {
                return Some((place, entry));
            }
        }
        None
    }

    /// The buckets in which a name of this hash may be.
    #[inline]
    fn probes(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let mask = self.buckets.len().wrapping_sub(1);
        (0..PROBES).map(move |nth| (lower(hash) + nth) & mask)
    }

    fn name(&self, place: u32) -> Option<&[u8]> {
        let begin = self.begin(place)? as usize + 1;
        self.text
            .get(begin..self.entries.get(place as usize)?.end as usize)
    }

    /// The place after another; after the last comes the first.
    fn after(&self, place: u32) -> u32 {
        if (place as usize) + 1 < self.entries.len() {
            place + 1
        } else {
            0
        }
    }

    /// The names with which a text begins, as far as they stand in the same order on the roll from some place on.
    ///
    /// Each of them has a comma behind it in the text, or ends it.
    fn run(&self, place: u32, text: &[u8]) -> Option<Run<'_>> {
        let begin = self.begin(place)?;
        let known = self.text.get(begin as usize..)?;
        let entries = self.entries.get(place as usize..)?;
        let first = (entries.first()?.end - begin) as usize;
        if text.get(..=first)? != known.get(..=first)? {
            return None;
        }
        // Behind a name that ends the text is a comma on the roll alone.
        let n_alike = n_alike(known, text);
        let n_whole = if n_alike == text.len() {
            n_alike + 1
        } else {
            n_alike
        };
        let bound = begin.checked_add(u32::try_from(n_whole).ok()?)?;
        let entries = entries.get(..entries.partition_point(|entry| entry.end + 1 < bound))?;
        (!entries.is_empty()).then_some(Run {
            entries,
            begin,
            place,
        })
    }

    fn begin(&self, place: u32) -> Option<u32> {
        match place.checked_sub(1) {
            None => Some(0),
            Some(before) => Some(self.entries.get(before as usize)?.end + 2),
        }
    }

    /// Whether the fleet has names where the roll says.
    pub(super) fn is_current(&self, fleet: &Fleet) -> bool {
        self.version == fleet.names_version()
    }

    /// Finds all names in the fleet again, if it has changed, and takes plain names in that are new.
    pub(super) fn update<'n>(&mut self, fleet: &Fleet, new: impl Iterator<Item = &'n str>) {
        if !self.is_current(fleet) {
            let mut begin = 1;
            for entry in &mut self.entries {
                let name = self
                    .text
                    .get(begin..entry.end as usize)
                    .and_then(|name| std::str::from_utf8(name).ok());
                entry.known.index = Known::of(name.and_then(|name| fleet.node_id(name))).index;
                begin = entry.end as usize + 3;
            }
            self.version = fleet.names_version();
        }
        for name in new {
            if self.entries.len() >= 2 * fleet.n_names() + SPARE {
                *self = Self {
                    version: self.version,
                    ..Self::default()
                };
            }
            self.add(name, fleet.node_id(name));
        }
        self.rank();
    }

    /// Ranks names anew if some have come.
    fn rank(&mut self) {
        let n_ranked = self.by_name.len();
        if n_ranked == self.entries.len() {
            return;
        }
        let mut by_name = std::mem::take(&mut self.by_name);
        by_name.extend(
            (0..self.entries.len())
                .skip(n_ranked)
                .filter_map(|place| u32::try_from(place).ok()),
        );
        by_name.sort_by_key(|place| self.name(*place));
        for (rank, place) in (0..).zip(&by_name) {
            if let Some(entry) = self.entries.get_mut(*place as usize) {
                entry.known.rank = rank;
            }
        }
        self.by_name = by_name;
    }

    fn add(&mut self, name: &str, node: Option<NodeId>) {
        let (Ok(place), Ok(end)) = (
            u32::try_from(self.entries.len()),
            u32::try_from(self.text.len() + 1 + name.len()),
        ) else {
            return;
        };
        let hash = hash(name.as_bytes());
        self.make_room();
        if name.len() > LONGEST || self.find(hash, name.as_bytes()).is_some() {
            return;
        }
        if !self.put(hash, place) {
            return;
        }
        self.text.extend([b"\"", name.as_bytes(), b"\","].concat());
        self.entries.push(Entry {
            hash: upper(hash),
            end,
            known: Known::of(node),
        });
    }

    /// Sees to it that at least half of the buckets are free.
    fn make_room(&mut self) {
        if 2 * (self.entries.len() + 1) <= self.buckets.len() {
            return;
        }
        self.buckets = vec![NOWHERE; 2 * (self.entries.len() + 1).next_power_of_two()];
        for place in 0..u32::try_from(self.entries.len()).unwrap_or(NOWHERE) {
            if let Some(hash) = self.name(place).map(hash) {
                self.put(hash, place);
            }
        }
    }

    /// Notes where a name of this hash is; `false` if there is no bucket left for it.
    fn put(&mut self, hash: u64, place: u32) -> bool {
        let free = self
            .probes(hash)
            .find(|bucket| self.buckets.get(*bucket) == Some(&NOWHERE));
        let bucket = free.and_then(|bucket| self.buckets.get_mut(bucket));
        bucket.map(|bucket| *bucket = place).is_some()
    }
}

fn hash(name: &[u8]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write(name);
    hasher.finish()
}

fn upper(hash: u64) -> u32 {
    u32::try_from(hash >> 32).unwrap_or(0)
}

fn lower(hash: u64) -> usize {
    usize::try_from(hash & u64::from(u32::MAX)).unwrap_or(0)
}

/// How many bytes two texts have in common from their beginnings.
fn n_alike(one: &[u8], other: &[u8]) -> usize {
    let stretches = one
        .as_chunks::<STRETCH>()
        .0
        .iter()
        .zip(other.as_chunks::<STRETCH>().0);
    let n_alike = stretches.take_while(|(one, other)| one == other).count() * STRETCH;
    let rest = one.iter().skip(n_alike).zip(other.iter().skip(n_alike));
    n_alike + rest.take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fleet(names: &[String]) -> Fleet {
        let mut fleet = Fleet::new();
        for name in names {
            fleet.set_inventory(name, placement::Inventory::default());
        }
        fleet
    }

    fn place(roll: &Roll, name: &str) -> Option<u32> {
        Some(roll.find(hash(name.as_bytes()), name.as_bytes())?.0)
    }

    /// The place of a name's node, which may be nowhere, or `None` if the name is not on the roll.
    fn node(roll: &Roll, name: &str) -> Option<u32> {
        Reader::of(roll).find(name.as_bytes()).map(|known| known.index)
    }

    fn index(fleet: &Fleet, name: &str) -> Option<u32> {
        fleet.node_id(name).map(NodeId::index)
    }

    fn names() -> impl Strategy<Value = Vec<String>> {
        prop::collection::btree_set("n[0-9]{0,2}(-[a-z]{0,70})?", 1..30)
            .prop_map(|names| names.into_iter().collect())
            .prop_shuffle()
    }

    proptest! {
        /// A run is as long as it can be, and all in it are names of the text.
        #[test]
        fn runs_are_what_comparing_names_says(known in names(), asked in names(), place in any::<prop::sample::Index>(), from in any::<prop::sample::Index>()) {
            let mut roll = Roll::default();
            roll.update(&fleet(&known), known.iter().map(String::as_str));
            let place = place.index(known.len());
            // What is asked about begins as the roll goes on, often for a while.
            let mut text: Vec<String> = known[place..].iter().take(from.index(known.len())).cloned().collect();
            text.extend(asked);
            let expected = text.iter().zip(&known[place..]).take_while(|(one, other)| one == other).count();
            let joined = text.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(",");
            let run = roll.run(u32::try_from(place).unwrap(), joined.as_bytes());
            let mut begin = 0;
            let ends: Vec<u32> = text[..expected].iter().map(|name| { let end = begin + 1 + u32::try_from(name.len()).unwrap(); begin = end + 2; end }).collect();
            prop_assert_eq!(run.map_or(Vec::new(), |run| run.ends(0).collect()), ends);
        }
    }

    proptest! {
        /// Whatever order names come in, a reader knows the node of each that is on the roll, and of no other.
        #[test]
        fn readers_find_every_name(known in names(), asked in names(), mixed in prop::collection::vec(any::<prop::sample::Index>(), 60)) {
            let (fleet, mut roll) = (fleet(&known), Roll::default());
            roll.update(&fleet, known.iter().map(String::as_str));
            // Strangers among them; and several rounds through the roll, shuffled into each other.
            let mut rounds = [known.clone(), known[known.len() / 2..].to_vec(), asked].map(Vec::into_iter);
            let mut text: Vec<String> = mixed.iter().filter_map(|at| rounds[at.index(3)].next()).collect();
            text.extend(rounds.into_iter().flatten());
            let mut reader = Reader::of(&roll);
            let mut read = Vec::new();
            while read.len() < text.len() {
                let rest = text[read.len()..].iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(",");
                match reader.run(rest.as_bytes()) {
                    Some(run) => read.extend(run.known().map(Some)),
                    None => read.push(reader.find(text[read.len()].as_bytes())),
                }
            }
            let known_of = |name: &String| known.contains(name).then(|| {
                let n_before = known.iter().filter(|other| *other < name).count();
                Known { index: index(&fleet, name).unwrap(), rank: u32::try_from(n_before).unwrap() }
            });
            prop_assert_eq!(read, text.iter().map(known_of).collect::<Vec<_>>());
        }
    }

    /// Names that were crafted to share a bucket cost no more than a few looks, and no other name is lost.
    #[test]
    fn crowded_buckets_keep_what_they_can() {
        let crowd: Vec<String> = (0..200_000)
            .map(|nth| format!("n{nth}"))
            .filter(|name| lower(hash(name.as_bytes())) & 0x3ff == 7)
            .collect();
        assert!(crowd.len() > 3 * PROBES, "{}", crowd.len());
        let (crowd, others) = (&crowd[..3 * PROBES], ["a", "b"]);
        let mut roll = Roll::default();
        roll.update(&Fleet::new(), crowd.iter().map(String::as_str).chain(others));
        let n_kept = crowd.iter().filter(|name| place(&roll, name).is_some()).count();
        assert!(
            (PROBES..crowd.len()).contains(&n_kept) && n_kept + 2 == roll.entries.len(),
            "{n_kept}"
        );
        assert!(others.iter().all(|name| place(&roll, name).is_some()));
    }

    #[test]
    fn places_follow_the_fleet() {
        let known: Vec<String> = ["a", "b"].map(str::to_owned).into();
        let (mut fleet, mut roll) = (fleet(&known), Roll::default());
        roll.update(&fleet, ["b", "a", "x"].into_iter());
        let [b, a, x] = ["b", "a", "x"].map(|name| place(&roll, name).unwrap());
        let nodes = |roll: &Roll| ["b", "a", "x", "c"].map(|name| node(roll, name));
        assert_eq!(
            nodes(&roll),
            [index(&fleet, "b"), index(&fleet, "a"), Some(NOWHERE), None]
        );
        assert!(roll.is_current(&fleet));
        assert_eq!(
            [b, a, x, roll.after(x)],
            [0, 1, 2, 0],
            "in the order in which they came"
        );
        fleet.remove_inventory("a");
        fleet.set_inventory("x", placement::Inventory::default());
        assert!(!roll.is_current(&fleet), "another node may be where one was");
        roll.update(&fleet, std::iter::empty());
        assert_eq!(
            nodes(&roll),
            [index(&fleet, "b"), Some(NOWHERE), index(&fleet, "x"), None]
        );
        assert!(roll.is_current(&fleet) && fleet.node_id("x").is_some());
    }

    #[test]
    fn names_that_nobody_has_do_not_pile_up() {
        let (fleet, mut roll) = (Fleet::new(), Roll::default());
        for nth in 0..SPARE + 10 {
            roll.update(&fleet, [nth.to_string().as_str()].into_iter());
        }
        assert!(
            roll.entries.len() <= SPARE && place(&roll, "0").is_none(),
            "{}",
            roll.entries.len()
        );
    }
}

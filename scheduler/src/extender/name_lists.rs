//! The lists of node names that requests repeat.
//!
//! kube-scheduler sends the same names in the same order for most pods of a cluster whose nodes it considers all. If it
//! considers a sample, it goes through all nodes in turn, and comes back to the same samples. Such a list is the end of the
//! body, byte for byte, so that one comparison takes the place of reading thousands of strings and looking each up.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use placement::NodeId;

use crate::index::Index;

/// The most lists that are remembered: 15,000 nodes are 20 samples.
const CAPACITY: usize = 32;

/// The fewest names of a list that is remembered: fewer are read as fast as they are compared.
const MIN_NAMES: usize = 256;

/// The most bytes of all lists together, and of a body whose list is remembered: more than 100,000 names.
const MAX_BYTES: usize = 4 << 20;

/// The bytes before the first name in a body of kube-scheduler, and those after the last name.
const START: &[u8] = b"\"NodeNames\":[\"";
const END: &[u8] = b"\"]}";

/// The end of a body with an empty list.
const EMPTY: &[u8] = b"\"NodeNames\":[]}";

/// The node names of a request, in its order.
#[derive(Debug)]
pub(super) enum NodeNames<'a> {
    Read(Vec<Cow<'a, str>>),
    /// As remembered from the body of an earlier request.
    Remembered(Arc<NameList>),
}

/// The end of a body from its last field on, which is the list of names.
#[derive(Debug)]
pub(super) struct NameList {
    tail: String,
    /// The place of each name in `tail`.
    spans: Vec<Range<u32>>,
    /// The nodes in the order of their names, as of a version of the fleet's table of node names; set when the list is used
    /// again.
    nodes: Mutex<(Option<u64>, NamedNodes)>,
}

/// The place of each name in the request, and its node in the fleet.
type NamedNodes = Arc<[(u32, Option<NodeId>)]>;

/// The lists that were used last, the latest first.
#[derive(Debug, Default)]
pub(super) struct NameLists(RwLock<Vec<Arc<NameList>>>);

impl NodeNames<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Read(names) => names.len(),
            Self::Remembered(list) => list.spans.len(),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).map(|idx| self.get(idx))
    }

    /// The name at this place; empty beyond the last one.
    #[inline]
    pub(super) fn get(&self, idx: usize) -> &str {
        match self {
            Self::Read(names) => names.get(idx).map_or("", AsRef::as_ref),
            Self::Remembered(list) => list.get(idx),
        }
    }

    /// True if [`Self::nodes`] are in the order of their names.
    pub(super) fn are_sorted(&self) -> bool {
        matches!(self, Self::Remembered(_))
    }

    /// The place of each name, and its node in the fleet: in the order of the names for a remembered list, else in that of the
    /// request.
    pub(super) fn nodes(&self, index: &Index) -> NamedNodes {
        let filter = index.filter();
        // The fleet's table of names of a large cluster does not fit the caches of a processor: without other work between
        // look-ups the processor waits for several of them at once.
        let look_up = |place: u32| (place, filter.node_id(self.get(place as usize)));
        let Self::Remembered(list) = self else {
            return (0..).map(look_up).take(self.len()).collect();
        };
        let version = Some(filter.names_version());
        let mut cached = list.nodes.lock();
        let (cached_version, nodes) = &mut *cached;
        if *cached_version != version {
            // Sorted once: the order of the names stays when nodes come and go.
            let places = match &**nodes {
                [] => list.sorted_places(),
                sorted => sorted.iter().map(|(place, _)| *place).collect(),
            };
            *nodes = places.into_iter().map(look_up).collect();
            *cached_version = version;
        }
        Arc::clone(nodes)
    }
}

impl NameList {
    #[inline]
    fn get(&self, idx: usize) -> &str {
        let Some(Range { start, end }) = self.spans.get(idx).cloned() else {
            return "";
        };
        // A u32 fits a usize on every platform that Kubernetes runs on.
        self.tail.get(start as usize..end as usize).unwrap_or_default()
    }

    /// The places of the names, in the order of the names.
    fn sorted_places(&self) -> Vec<u32> {
        let mut places: Vec<u32> = (0..).zip(&self.spans).map(|(place, _)| place).collect();
        places.sort_by_key(|place| self.get(*place as usize));
        places
    }

    /// The list at the end of a body, from which `names` were read; `None` if the names are few or the body is long, or if the
    /// list is not the end of the body, name for name as it is.
    fn of(body: &str, names: &[Cow<'_, str>]) -> Option<Self> {
        if names.len() < MIN_NAMES || body.len() > MAX_BYTES {
            return None;
        }
        // A name that borrows from the body lies in it as it is; one that is owned has an escape there.
        let offset = |name: &Cow<'_, str>| match name {
            Cow::Borrowed(name) => name.as_ptr().addr().checked_sub(body.as_ptr().addr()),
            Cow::Owned(_) => None,
        };
        let (first, last) = (names.first()?, names.last()?);
        let begin = body.get(..offset(first)?)?.len().checked_sub(START.len())?;
        let end = offset(last)?.checked_add(last.len())?;
        let is_last_field = body.as_bytes().get(begin..)?.starts_with(START)
            && body.as_bytes().get(end..)?.trim_ascii_end() == END;
        if !is_last_field {
            return None;
        }
        let mut spans = Vec::with_capacity(names.len());
        for name in names {
            let start = offset(name)?.checked_sub(begin)?;
            spans.push(u32::try_from(start).ok()?..u32::try_from(start + name.len()).ok()?);
        }
        Some(Self {
            tail: body.get(begin..)?.to_owned(),
            spans,
            nodes: Mutex::default(),
        })
    }
}

impl NameLists {
    /// The remembered list that a body ends with, and the body with an empty list in its place.
    ///
    /// Both bodies are valid JSON, or neither: one array replaces another, and the same end of the object follows.
    pub(super) fn find(&self, body: &[u8]) -> Option<(Arc<NameList>, Vec<u8>)> {
        // Under a read lock, since requests compare their long bodies with the lists at the same time.
        let lists = self.0.read();
        let at = lists
            .iter()
            .position(|list| body.ends_with(list.tail.as_bytes()))?;
        let list = Arc::clone(lists.get(at)?);
        drop(lists);
        if at > 0 {
            let mut lists = self.0.write();
            // Another request may have moved or dropped it meanwhile.
            if let Some(at) = lists.iter().position(|other| Arc::ptr_eq(other, &list))
                && let Some(used) = lists.get_mut(..=at)
            {
                used.rotate_right(1);
            }
        }
        let head = body.strip_suffix(list.tail.as_bytes())?;
        Some((list, [head, EMPTY].concat()))
    }

    /// Remembers the list of a body, if it can be used again.
    pub(super) fn remember(&self, body: &str, names: &[Cow<'_, str>]) {
        let Some(list) = NameList::of(body, names) else {
            return;
        };
        let mut lists = self.0.write();
        lists.insert(0, Arc::new(list));
        lists.truncate(CAPACITY);
        let mut n_bytes = 0;
        lists.retain(|list| {
            n_bytes += list.tail.len();
            n_bytes <= MAX_BYTES
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::extender::evaluation::FilterRequest;
    use crate::offline;
    use crate::watch::ObjectStore;

    /// The number of nodes, which is enough for a list to be remembered.
    const N_NODES: usize = 300;

    fn name(at: usize) -> String {
        format!("node-{at}.example.com")
    }

    fn node(at: usize) -> Value {
        let amounts = json!({"aliyun.com/gpu-mem": "8", "aliyun.com/gpu-count": "1"});
        json!({"metadata": {"name": name(at)}, "status": {"capacity": amounts, "allocatable": amounts}})
    }

    /// A body as kube-scheduler writes it.
    fn body(pod: &str, names: &[String]) -> String {
        let pod = json!({"metadata": {"uid": pod}});
        format!(
            r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{}}}"#,
            Value::from(names)
        )
    }

    /// A change of a body, or of its list, from one request to the next.
    #[derive(Clone, Copy, Debug)]
    enum Change {
        Nothing,
        Rotated(usize),
        Part(usize),
        Repeated,
        UnknownNode,
        Escaped,
        /// A byte of the body is another.
        Byte(prop::sample::Index, u8),
        Cut(prop::sample::Index),
        NewlineBehind,
        ListTwice,
        /// The list is a field of the pod.
        InPod,
        PodAtTheEnd,
    }

    impl Change {
        fn body(self) -> Vec<u8> {
            let mut names: Vec<String> = (0..N_NODES).map(name).collect();
            match self {
                Self::Rotated(n) => names.rotate_left(n),
                Self::Part(n) => names.truncate(n),
                Self::Repeated => names.extend_from_within(..2),
                Self::UnknownNode => names.push(name(N_NODES)),
                _ => {}
            }
            let text = body("p", &names);
            let list = Value::from(names);
            let text = match self {
                Self::Escaped => text.replacen("node", r"\u006eode", 1),
                Self::NewlineBehind => text + "\n",
                Self::ListTwice => text.replacen(r#""Nodes":null"#, r#""NodeNames":["a"]"#, 1),
                Self::InPod => format!(r#"{{"Pod":{{"metadata":{{}},"NodeNames":{list}}}"#),
                Self::PodAtTheEnd => format!(r#"{{"NodeNames":{list},"Pod":{{}}}}"#),
                _ => text,
            };
            let mut bytes = text.into_bytes();
            match self {
                Self::Byte(at, other) => {
                    let at = at.index(bytes.len());
                    bytes[at] = other;
                }
                Self::Cut(at) => bytes.truncate(at.index(bytes.len())),
                _ => {}
            }
            bytes
        }
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            4 => Just(Change::Nothing),
            1 => (0..N_NODES).prop_map(Change::Rotated),
            1 => (0..N_NODES).prop_map(Change::Part),
            1 => Just(Change::Repeated),
            1 => Just(Change::UnknownNode),
            1 => Just(Change::Escaped),
            2 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
            1 => any::<prop::sample::Index>().prop_map(Change::Cut),
            1 => Just(Change::NewlineBehind),
            1 => Just(Change::ListTwice),
            1 => Just(Change::InPod),
            1 => Just(Change::PodAtTheEnd),
        ]
    }

    /// The names, their nodes and the pod of a request as text, or the error.
    fn read(body: &[u8], lists: &NameLists, index: &Index) -> Result<String, String> {
        let request = FilterRequest::parse("filter", body, lists).map_err(|error| error.to_string())?;
        let names: Vec<&str> = request.names.iter().collect();
        let mut nodes = request.names.nodes(index).to_vec();
        nodes.sort_unstable_by_key(|(place, _)| *place);
        Ok(format!("{names:?} {nodes:?} {:?}", request.pod))
    }

    proptest! {
        /// A remembered list is read as any other, whatever came before it, and while nodes come and go.
        #[test]
        fn remembered_lists_are_read_as_others(steps in prop::collection::vec((change(), 0..N_NODES, any::<bool>()), 1..12)) {
            let mut index = offline::index((0..N_NODES).map(node), std::iter::empty(), std::iter::empty());
            let lists = NameLists::default();
            for (change, at, is_changed) in steps {
                if is_changed {
                    let node: proto::node::Node = serde_json::from_value(node(at)).unwrap();
                    if index.filter().node_id(&name(at)).is_some() {
                        index.delete(&node);
                    } else {
                        index.apply(node);
                    }
                }
                let body = change.body();
                prop_assert_eq!(read(&body, &lists, &index), read(&body, &NameLists::default(), &index), "{:?}", change);
            }
        }
    }

    /// Without this the other test would compare nothing.
    #[test]
    fn equal_lists_are_remembered() {
        let lists = NameLists::default();
        let names: Vec<String> = (0..N_NODES).map(name).collect();
        let is_remembered = |pod: &str, names: &[String]| {
            let body = body(pod, names);
            let request = FilterRequest::parse("filter", body.as_bytes(), &lists).unwrap();
            matches!(request.names, NodeNames::Remembered(_))
        };
        assert!(!is_remembered("a", &names), "the first of its kind");
        assert!(is_remembered("another", &names));
        assert!(!is_remembered("a", &names[1..]));
        assert!(is_remembered("a", &names[1..]) && is_remembered("a", &names));
        for n_fewer in 2..2 + CAPACITY {
            assert!(!is_remembered("a", &names[n_fewer..]));
        }
        assert!(!is_remembered("a", &names), "too many others came after it");
        assert!(
            !is_remembered("a", &names[..10]) && !is_remembered("a", &names[..10]),
            "few names"
        );
        assert!(is_remembered("a", &names), "short as it is");
        let long: Vec<String> = (0..40_000).map(name).collect();
        for n_fewer in 0..=MAX_BYTES / Value::from(long.clone()).to_string().len() {
            assert!(!is_remembered("a", &long[n_fewer..]));
        }
        assert!(!is_remembered("a", &names), "the others are long");
    }
}

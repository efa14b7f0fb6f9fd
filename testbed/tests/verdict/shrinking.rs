//! Makes a failing case small: objects, and then fields of objects, are taken out while the difference stays.

use serde_json::Value;

use super::cluster::Case;
use super::comparison::{Difference, Tally, compare};

/// Most tries for one case.
const TRIES: usize = 4000;

/// The smallest case that is found with a difference of the same kind, and that difference.
pub(crate) async fn shrink(mut case: Case, mut difference: Difference) -> (Case, Difference) {
    let mut tries = 0;
    loop {
        let mut has_shrunk = false;
        let mut paths = Vec::new();
        collect_paths(&case.objects, &mut String::new(), &mut paths);
        // The largest parts first; a path that is gone with a larger part changes nothing, and costs no try.
        for path in paths {
            let Some(smaller) = without(&case, &path) else {
                continue;
            };
            tries += 1;
            if tries > TRIES {
                return (case, difference);
            }
            let found = compare(&smaller, &mut Tally::default()).await;
            if let Some(found) = found.filter(|found| found.question == difference.question) {
                (case, difference, has_shrunk) = (smaller, found, true);
            }
        }
        if !has_shrunk {
            return (case, difference);
        }
    }
}

/// The JSON pointers of everything in a value, parents first, the last of a list first, so that earlier indices stay.
fn collect_paths(value: &Value, at: &mut String, paths: &mut Vec<String>) {
    let mut children: Vec<(String, &Value)> = match value {
        Value::Array(items) => {
            let numbered = items.iter().enumerate();
            numbered.map(|(n, item)| (n.to_string(), item)).collect()
        }
        Value::Object(fields) => {
            let escape = |key: &String| key.replace('~', "~0").replace('/', "~1");
            fields.iter().map(|(key, field)| (escape(key), field)).collect()
        }
        _ => return,
    };
    children.reverse();
    for (key, child) in children {
        let end = at.len();
        at.push('/');
        at.push_str(&key);
        paths.push(at.clone());
        collect_paths(child, at, paths);
        at.truncate(end);
    }
}

/// The case without the part at a path; `None` if there is none, or the rest would be no case.
fn without(case: &Case, path: &str) -> Option<Case> {
    let (parent, key) = path.rsplit_once('/')?;
    // The lists, and what identifies an object.
    let is_needed = parent.is_empty() || path.ends_with("/metadata/name") || path.ends_with("/metadata/uid");
    if is_needed || path.ends_with("/metadata") || path.ends_with("/schedulerName") {
        return None;
    }
    let mut smaller = case.clone();
    match smaller.objects.pointer_mut(parent)? {
        Value::Array(items) => {
            let n: usize = key.parse().ok()?;
            (n < items.len()).then(|| items.remove(n))?;
        }
        Value::Object(fields) => {
            fields.remove(&key.replace("~1", "/").replace("~0", "~"))?;
        }
        _ => return None,
    }
    Some(smaller)
}

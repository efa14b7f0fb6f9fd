//! Lists, in pages, without `remainingItemCount`.
//!
//! All pages of a list have the revision of the first, and show the objects as they are when the page is read: a watch from that
//! revision reports what has changed in between.

use std::sync::Arc;

use super::selector::Selectors;
use super::status::ApiError;
use super::store::{Key, ObjectVersion, Store};

#[derive(Debug, Clone, Default)]
pub(crate) struct ListQuery {
    /// Empty for all namespaces.
    pub(crate) namespace: String,
    pub(crate) selectors: Selectors,
    pub(crate) limit: Option<usize>,
    /// The `continue` parameter.
    pub(crate) token: Option<String>,
    /// The `resourceVersion` parameter.
    pub(crate) revision: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct ListPage {
    pub(crate) revision: u64,
    pub(crate) items: Vec<Arc<ObjectVersion>>,
    /// The `continue` token of the next page; `None` for the last page.
    pub(crate) next: Option<String>,
}

/// One page of a list; without a limit it has all objects.
pub(crate) fn list(store: &Store, storage: &str, query: &ListQuery) -> Result<ListPage, ApiError> {
    let current = store.revision();
    if let Some(asked) = query.revision.filter(|asked| *asked > current) {
        return Err(ApiError::too_large_version(asked, current));
    }
    let (revision, after) = match query.token.as_deref() {
        Some(token) => {
            let (revision, key) = parse_token(token)?;
            // Reads no change, only checks that the window still has those after the first page.
            store.events(storage, revision, 0).map_err(|_| expired())?;
            (revision, Some(key))
        }
        None => (current, None),
    };
    let mut found = store
        .scan(storage, &query.namespace, after.as_ref())
        .filter(|(_, version)| query.selectors.matches(&version.value));
    let limit = query.limit.filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let (mut items, mut last) = (Vec::new(), None);
    for (key, version) in found.by_ref().take(limit) {
        items.push(Arc::clone(version));
        last = Some(key);
    }
    let next = last
        .filter(|_| found.next().is_some())
        .map(|key| format!("{revision}/{}/{}", key.namespace, key.name));
    Ok(ListPage {
        revision,
        items,
        next,
    })
}

/// The 410 for a list whose first page is too old.
fn expired() -> ApiError {
    let why = "The provided continue parameter is too old to display a consistent list result. You must start a new list \
               without the continue parameter.";
    ApiError::new(410, why)
}

/// The revision and key in a `continue` token.
fn parse_token(token: &str) -> Result<(u64, Key), ApiError> {
    let parts: Vec<&str> = token.splitn(3, '/').collect();
    if let [revision, namespace, name] = parts.as_slice()
        && let Ok(revision) = revision.parse()
    {
        return Ok((revision, Key::new(*namespace, *name)));
    }
    Err(ApiError::bad_request("continue key is not valid"))
}

//! The places of a listener, one for each open connection, and the connection that ends when all places are taken.
//!
//! Every client of the network can connect, so places are given by address: at most a quarter to one address. When all are taken,
//! the address with the most connections loses the one that has been quiet longest.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;
use tokio::time::Instant;
use tracing::warn;

use super::conversation::Conversation;
use crate::log_limit::LogLimit;
use crate::panics::named;

/// One address may take one of this many parts of all places, and so may all connections in their TLS handshake together.
const N_PARTS: usize = 4;

/// Addresses at which the connections of many clients end: port-forwards, and the other containers of the pod.
const SHARED_ADDRESSES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// Limit the log lines about connections that were refused, and that were ended for others.
static REFUSED: LogLimit = LogLimit::new();
static ENDED: LogLimit = LogLimit::new();

#[derive(Clone, Debug)]
pub(super) struct Places {
    most: usize,
    taken: Arc<Mutex<Taken>>,
}

/// The connections that have a place, by the order in which they were accepted.
#[derive(Debug, Default)]
struct Taken {
    next_number: u64,
    open: BTreeMap<u64, OpenConnection>,
}

#[derive(Debug)]
struct OpenConnection {
    conversation: Conversation,
    task: AbortHandle,
}

struct PlaceGuard {
    places: Places,
    number: u64,
}

impl Places {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            taken: Arc::default(),
        }
    }

    /// Serves a connection on a task of its own, if a place is free or can be freed; else drops it.
    pub(super) fn serve(
        &self,
        conversation: Conversation,
        serving: impl Future<Output = ()> + Send + 'static,
    ) {
        let address = conversation.address;
        let mut taken = self.lock();
        let ended = match taken.accept(address, self.most) {
            Accept::Free => None,
            Accept::InsteadOf(number) => taken.open.remove(&number),
            Accept::Refuse => {
                drop(taken);
                if let Some(left_out) = REFUSED.next_line() {
                    warn!(%address, most = self.most, left_out, "connection refused: none of those that could make room is without a request in work");
                }
                return;
            }
        };
        let (number, places) = (taken.next_number, self.clone());
        taken.next_number += 1;
        let place = PlaceGuard { places, number };
        let task = tokio::spawn(named("connection", async move {
            let _place = place;
            serving.await;
        }));
        // Under the lock, so that a task that ends at once finds its place.
        let task = task.abort_handle();
        taken.open.insert(number, OpenConnection { conversation, task });
        drop(taken);
        if let Some(ended) = ended {
            ended.task.abort();
            if let Some(left_out) = ENDED.next_line() {
                let address = ended.conversation.address;
                warn!(%address, most = self.most, left_out, "connection ended to make room for another one");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Accept {
    /// A place is free.
    Free,
    /// The connection of this number ends, and leaves its place.
    InsteadOf(u64),
    /// No place is free, and no connection may end for the new one.
    Refuse,
}

impl Taken {
    /// The answer to a client at this address that connects, where `most` connections have a place.
    fn accept(&self, address: IpAddr, most: usize) -> Accept {
        let share = (most / N_PARTS).max(1);
        // No limit can be reached: nothing has to be counted.
        if self.open.len() < share {
            return Accept::Free;
        }
        let mut by_address: BTreeMap<IpAddr, usize> = BTreeMap::new();
        let mut n_handshakes = 0;
        for connection in self.open.values() {
            *by_address.entry(connection.conversation.address).or_default() += 1;
            n_handshakes += usize::from(connection.conversation.is_in_handshake());
        }
        let of_address = by_address.get(&address).copied().unwrap_or_default();
        let ended = if of_address >= share && !SHARED_ADDRESSES.contains(&address) {
            self.quietest(&by_address, |conversation| conversation.address == address)
        } else if n_handshakes >= share {
            self.quietest(&by_address, Conversation::is_in_handshake)
        } else if self.open.len() >= most {
            // If all connections have requests in work, which may never end, the largest address gives one up.
            let quietest = self.quietest(&by_address, |_| true);
            quietest.or_else(|| self.oldest_of_largest(&by_address, of_address))
        } else {
            return Accept::Free;
        };
        ended.map_or(Accept::Refuse, Accept::InsteadOf)
    }

    /// The oldest connection of the address with the most, if it keeps as many as the new client, which has `of_address` before.
    fn oldest_of_largest(&self, by_address: &BTreeMap<IpAddr, usize>, of_address: usize) -> Option<u64> {
        let (largest, n) = by_address.iter().max_by_key(|(_, n)| **n)?;
        let mut open = self.open.iter();
        let (number, _) = open.find(|(_, connection)| connection.conversation.address == *largest)?;
        (*n >= of_address + 2).then_some(*number)
    }

    /// The quietest connection of the address with the most, of those that `may_end` accepts and that have no request in work.
    fn quietest(
        &self,
        by_address: &BTreeMap<IpAddr, usize>,
        may_end: impl Fn(&Conversation) -> bool,
    ) -> Option<u64> {
        let now = Instant::now();
        // While some client has more than two connections, a client with a single connection does not lose it.
        let least = if by_address.values().any(|n| *n > 2) { 2 } else { 1 };
        let mut candidates = Vec::new();
        for (number, OpenConnection { conversation, .. }) in &self.open {
            let n = by_address.get(&conversation.address).copied().unwrap_or_default();
            if let Some(since) = conversation.quiet_since()
                && may_end(conversation)
                && n >= least
            {
                candidates.push((n, now.saturating_duration_since(since), *number));
            }
        }
        let (.., number) = candidates.into_iter().max()?;
        Some(number)
    }
}

impl Drop for PlaceGuard {
    fn drop(&mut self) {
        self.places.lock().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use rstest::rstest;
    use tokio::task::yield_now;
    use tokio::time::advance;

    use super::*;

    const MOST: usize = 8;

    fn address(n: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, n))
    }

    /// Takes a place for a connection that stays, one second after the one before.
    async fn connect(places: &Places, from: IpAddr, has_handshake: bool) -> Conversation {
        advance(Duration::from_secs(1)).await;
        let conversation = Conversation::new(from, Duration::from_secs(10), has_handshake);
        places.serve(conversation.clone(), pending());
        yield_now().await;
        conversation
    }

    /// The last bytes of the addresses with a place, in the order of their connections.
    fn open(places: &Places) -> Vec<u8> {
        let mut open = Vec::new();
        for connection in places.lock().open.values() {
            match connection.conversation.address {
                IpAddr::V4(address) => open.push(address.octets()[3]),
                IpAddr::V6(_) => open.push(0),
            }
        }
        open
    }

    #[rstest]
    #[case::room_for_all(&[1, 2, 3], &[1, 2, 3])]
    #[case::a_quarter_for_an_address(&[1, 1, 1, 2], &[1, 1, 2])]
    #[case::its_own_connection_ends_for_one_more(&[2, 1, 1, 1], &[2, 1, 1])]
    #[case::the_quietest_of_the_largest(&[1, 2, 2, 3, 3, 4, 5, 6, 7], &[1, 2, 3, 3, 4, 5, 6, 7])]
    #[case::among_equals_the_quietest(&[1, 2, 3, 4, 5, 6, 7, 8, 9], &[2, 3, 4, 5, 6, 7, 8, 9])]
    #[tokio::test(start_paused = true)]
    async fn places_are_given_by_address(#[case] clients: &[u8], #[case] expected: &[u8]) {
        let places = Places::new(MOST);
        for client in clients {
            connect(&places, address(*client), false).await;
        }
        assert_eq!(open(&places), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_in_work_are_not_cut_off() {
        let places = Places::new(MOST);
        let mut answering = Vec::new();
        for client in 1..=8 {
            answering.push(connect(&places, address(client), false).await.answering());
        }
        connect(&places, address(9), false).await;
        assert_eq!(open(&places), [1, 2, 3, 4, 5, 6, 7, 8]);
        answering.remove(3);
        connect(&places, address(9), false).await;
        assert_eq!(open(&places), [1, 2, 3, 5, 6, 7, 8, 9]);
    }

    /// Four addresses whose requests never end keep no other address out, and end no only connection.
    #[tokio::test(start_paused = true)]
    async fn unfinished_requests_of_a_few_addresses_make_room() {
        const MOST: usize = 17;
        let places = Places::new(MOST);
        connect(&places, address(9), false).await;
        let mut unfinished = Vec::new();
        for n in 0..16 {
            unfinished.push(connect(&places, address(n % 4), false).await.answering());
        }
        connect(&places, address(8), false).await;
        assert_eq!(open(&places), [9, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 8]);
        assert_eq!(open(&places).len(), MOST);
    }

    /// A client that only begins handshakes ends other handshakes, and no connection past its own.
    #[tokio::test(start_paused = true)]
    async fn handshakes_have_a_share_of_the_places() {
        let places = Places::new(MOST);
        connect(&places, address(1), true).await.note_handshake();
        for client in 2..=6 {
            connect(&places, address(client), true).await;
        }
        assert_eq!(open(&places), [1, 5, 6]);
    }

    /// All port-forwards of a pod end at its loopback address.
    #[tokio::test(start_paused = true)]
    async fn the_loopback_address_may_have_all_places() {
        let places = Places::new(MOST);
        for _ in 0..=MOST {
            connect(&places, SHARED_ADDRESSES[0], false).await;
        }
        assert_eq!(open(&places).len(), MOST);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_ends_frees_its_place() {
        let places = Places::new(MOST);
        let conversation = Conversation::new(address(1), Duration::from_secs(10), false);
        places.serve(conversation, async {});
        yield_now().await;
        assert_eq!(open(&places), [] as [u8; 0]);
    }
}

//! A model of kube-apiserver, for real clients that talk to it over HTTP on loopback.
//!
//! It models the rules of the API over untyped objects in memory: resource versions, lists, watches, patches, server-side apply,
//! grace periods, binding and eviction, custom resources, `ValidatingAdmissionPolicy` objects and admission webhooks. It was
//! compared with kube-apiserver 1.36.2 for admission policies, by the answers recorded in
//! `testbed/kit/tests/apiserver/policies.rs`. The other rules are not compared with recordings: they follow the code and
//! documents of 1.33, the version that the model reports. Names such as `BeforeDelete` in comments are functions of that code.
//!
//! It leaves out authorisation (every request is allowed, and recorded), built-in admission plugins, the garbage collector,
//! controllers and persistence. Of the API it leaves out lists at past revisions (pages after the first show the present), the
//! group `events.k8s.io`, conversion between versions of a custom resource, and webhooks by URL. Bodies are JSON or YAML:
//! `kubectl create namespace` and the like, which send protobuf and do not fall back, get 415; `kubectl apply`, `run` and
//! `create -f` send JSON.
//!
//! `store`, `selector`, `patch`, `pod` and `verbs` are synchronous and touch no network; `http` is a thin layer over them,
//! and [`ApiObjects`] is the same layer for callers in this process.

mod access;
mod admission;
mod api_objects;
pub mod command;
mod container_programs;
mod discovery;
mod faults;
mod http;
mod name;
pub mod object;
mod patch;
mod pod;
mod pod_log;
mod read;
mod render;
mod resource;
mod selector;
mod status;
mod store;
mod table;
mod verbs;
mod watch;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::access::{UsedAccess, User};
pub use self::api_objects::ApiObjects;
pub use self::faults::{Fault, Faults, HeldWatches, Injected, Matching};
pub use self::resource::Resource;
pub use self::status::ApiError;

use self::access::{Audit, Tokens};
use self::http::Server;

/// The number of changes that the server keeps for each resource; a watch or `continue` token from before them gets 410.
const EVENT_WINDOW: usize = 50_000;

/// Settings of an API server.
#[derive(Debug, Clone)]
pub struct ApiServerConfig {
    /// The address to listen on; port 0 takes a free port.
    pub listen: SocketAddr,
    /// Bearer tokens and their users. Without any token the server authenticates no request.
    pub tokens: HashMap<String, User>,
}

impl ApiServerConfig {
    /// A free port on loopback, and no tokens.
    pub fn loopback() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            tokens: HashMap::new(),
        }
    }
}

/// A running API server. Dropping this handle stops the server without waiting for running requests.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    server: Arc<Server>,
    serving: JoinHandle<()>,
    stop: DropGuard,
}

impl ApiServer {
    /// Starts a server with an empty cluster.
    pub async fn start(config: ApiServerConfig) -> io::Result<Self> {
        let objects = ApiObjects::new(EVENT_WINDOW);
        Self::start_with(config, objects).await
    }

    /// Starts a server over an existing cluster, such as that of a server that was shut down.
    pub async fn start_with(config: ApiServerConfig, objects: ApiObjects) -> io::Result<Self> {
        let listener = TcpListener::bind(config.listen).await?;
        let address = listener.local_addr()?;
        let server = Arc::new(Server {
            objects,
            tokens: Tokens::new(config.tokens),
            audit: Audit::default(),
            faults: Faults::new(),
            stopping: CancellationToken::new(),
        });
        let serving = tokio::spawn(http::serve(listener, Arc::clone(&server)));
        let stop = server.stopping.clone().drop_guard();
        Ok(Self {
            address,
            server,
            serving,
            stop,
        })
    }

    /// Base URL without a trailing slash.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The objects behind the server, without HTTP.
    pub fn objects(&self) -> &ApiObjects {
        &self.server.objects
    }

    /// Faults that the server injects.
    pub fn faults(&self) -> &Faults {
        &self.server.faults
    }

    /// A bearer token of a user, if the user has any.
    pub fn token_of(&self, user: &str) -> Option<String> {
        self.server.tokens.token_of(user)
    }

    /// The kinds of access that have been used over HTTP so far.
    pub fn accesses(&self) -> BTreeSet<UsedAccess> {
        self.server.audit.snapshot()
    }

    /// Adds a token for a user. The first token turns authentication on: from then on requests without a token get 401.
    pub fn add_token(&self, token: &str, user: User) {
        self.server.tokens.add(token.to_owned(), user);
    }

    /// Writes a kubeconfig file for a user; it holds the user's token if there is one.
    ///
    /// A reader sees the whole file or none.
    pub fn kubeconfig(&self, path: &Path, user: &str) -> io::Result<()> {
        self.kubeconfig_with(path, user, self.server.tokens.token_of(user).as_deref())
    }

    /// Writes a kubeconfig file for a user with this token: a user may have several.
    pub fn kubeconfig_with(&self, path: &Path, user: &str, token: Option<&str>) -> io::Result<()> {
        let text = access::kubeconfig(&self.url(), user, token);
        // A daemon may be reading the file at this moment; a rename never shows it half of the text.
        let temporary = path.with_extension("new");
        std::fs::write(&temporary, text)?;
        std::fs::rename(temporary, path)
    }

    /// Stops accepting, ends all watches, and waits for the running requests.
    pub async fn shutdown(self) {
        drop(self.stop);
        if let Err(error) = self.serving.await {
            tracing::warn!(%error, "the API server did not end cleanly");
        }
    }
}

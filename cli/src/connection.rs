//! The connection to the API server, from the kubeconfig and the flags.

use std::time::Duration;

use http::{HeaderName, HeaderValue};
use k8s_openapi::NamespaceResourceScope;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use crate::args::ConnectionArgs;
use crate::failure::{CommandFailure, with_sources};
use crate::fields::text;

/// The longest time that one request to the API server may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Objects of one page of a list.
const PAGE: u32 = 500;

/// The cluster, and the user and namespace in it.
#[derive(Clone)]
pub(crate) struct ClusterConnection {
    pub(crate) args: ConnectionArgs,
    client: Result<Client, String>,
    /// The namespace of the pods in question.
    pub(crate) namespace: String,
}

impl ClusterConnection {
    /// Reads the kubeconfig; sends no request.
    pub(crate) async fn new(args: ConnectionArgs) -> Result<Self, CommandFailure> {
        let config = match config(&args).await {
            Ok(config) => config,
            // With the address of a read API, most commands need no API server.
            Err(reason) if args.read_api.is_some() => {
                let namespace = args.namespace.clone().unwrap_or_else(|| "default".to_owned());
                return Ok(Self {
                    args,
                    client: Err(reason),
                    namespace,
                });
            }
            Err(reason) => return Err(CommandFailure::Kubeconfig(reason)),
        };
        let namespace = args
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        let client =
            Client::try_from(config).map_err(|error| CommandFailure::Kubeconfig(with_sources(&error)))?;
        Ok(Self {
            args,
            client: Ok(client),
            namespace,
        })
    }

    /// The client of the API server.
    pub(crate) fn client(&self) -> Result<Client, CommandFailure> {
        self.client.clone().map_err(CommandFailure::Kubeconfig)
    }

    /// The JSON at a path of the API server; `None` if there is nothing.
    pub(crate) async fn get(&self, action: &str, path: &str) -> Result<Option<Value>, CommandFailure> {
        let request = http::Request::get(path).body(Vec::new());
        let request = request.map_err(CommandFailure::input)?;
        let client = self.client()?;
        match timeout(ANSWER_TIMEOUT, client.request::<Value>(request)).await {
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(None),
            Ok(Err(error)) => Err(CommandFailure::of_kube(action, error)),
            Err(_) => Err(no_answer(action)),
        }
    }

    /// The objects of the list at a path as JSON, in pages; none if the API server does not know their kind.
    pub(crate) async fn list_json(&self, path: &str) -> Result<Vec<Value>, CommandFailure> {
        let mut objects = Vec::new();
        let mut token = String::new();
        loop {
            let page = format!("{path}?limit={PAGE}&continue={token}");
            let mut list = self
                .get(&format!("list {path}"), &page)
                .await?
                .unwrap_or_default();
            if let Some(Value::Array(items)) = list.get_mut("items").map(Value::take) {
                objects.extend(items);
            }
            match text(&list, "/metadata/continue") {
                // An API server without more pages leaves the token out, or sends an empty one.
                "" => return Ok(objects),
                // Tokens are base64, of which only these characters mean something in a query.
                next => token = next.replace('+', "%2B").replace('=', "%3D"),
            }
        }
    }

    /// All objects of a kind, in pages.
    pub(crate) async fn list<K>(&self, what: &str, selector: Option<&str>) -> Result<Vec<K>, CommandFailure>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        list_pages(&Api::all(self.client()?), what, selector).await
    }

    /// The objects of a kind in one namespace, in pages.
    pub(crate) async fn list_in<K>(
        &self,
        namespace: &str,
        what: &str,
        selector: Option<&str>,
    ) -> Result<Vec<K>, CommandFailure>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        list_pages(&Api::namespaced(self.client()?, namespace), what, selector).await
    }
}

/// The failure of a request that a server accepts and does not answer.
fn no_answer(action: &str) -> CommandFailure {
    CommandFailure::Unreachable(format!(
        "no answer within {ANSWER_TIMEOUT:?} to the request to {action}"
    ))
}

async fn list_pages<K>(api: &Api<K>, what: &str, selector: Option<&str>) -> Result<Vec<K>, CommandFailure>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let mut params = ListParams::default().limit(PAGE);
    params.label_selector = selector.map(str::to_owned);
    let mut objects = Vec::new();
    loop {
        let action = format!("list {what}");
        let page = timeout(ANSWER_TIMEOUT, api.list(&params)).await;
        let page = page.map_err(|_| no_answer(&action))?;
        let page = page.map_err(|error| CommandFailure::of_kube(action, error))?;
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(objects),
        }
    }
}

async fn config(args: &ConnectionArgs) -> Result<Config, String> {
    let options = KubeConfigOptions {
        context: args.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = match &args.kubeconfig {
        // As for kubectl, --kubeconfig wins over KUBECONFIG, whose files would be merged.
        Some(path) => match Kubeconfig::read_from(path) {
            Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &options).await,
            Err(error) => Err(error),
        },
        None => Config::from_kubeconfig(&options).await,
    };
    let mut config = config.map_err(|error| with_sources(&error))?;
    // With its minutes of repetition a command would seem to hang where a sentence helps.
    config.default_retry = false;
    if let Some(user) = &args.impersonate {
        let value = HeaderValue::from_str(user).map_err(|_| format!("--as={user:?} is no user name"))?;
        config
            .headers
            .push((HeaderName::from_static("impersonate-user"), value));
    }
    Ok(config)
}

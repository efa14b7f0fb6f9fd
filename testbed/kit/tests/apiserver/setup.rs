//! Servers, clients and objects that the tests share.

use std::time::Duration;

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kit::apiserver::{ApiServer, ApiServerConfig};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

/// The longest that anything here may take.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) async fn start() -> ApiServer {
    start_with(|_| {}).await
}

pub(crate) async fn start_with(change: impl FnOnce(&mut ApiServerConfig)) -> ApiServer {
    let mut config = ApiServerConfig::loopback();
    change(&mut config);
    ApiServer::start(config).await.unwrap()
}

pub(crate) fn client(server: &ApiServer) -> Client {
    let mut config = kube::Config::new(server.url().parse().unwrap());
    config.default_namespace = "default".to_owned();
    Client::try_from(config).unwrap()
}

pub(crate) fn pods(server: &ApiServer) -> Api<Pod> {
    Api::default_namespaced(client(server))
}

pub(crate) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "busybox"}]},
    })
}

pub(crate) fn typed(name: &str) -> Pod {
    serde_json::from_value(pod(name)).unwrap()
}

pub(crate) async fn bind(pods: &Api<Pod>, name: &str, node: &str) -> kube::Result<Value> {
    let target = json!({"kind": "Node", "name": node});
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {}, "target": target});
    pods.create_subresource("binding", name, &PostParams::default(), &binding)
        .await
}

/// The next item of a stream, which must come in time.
pub(crate) async fn next<T>(stream: &mut (impl Stream<Item = T> + Unpin)) -> T {
    tokio::time::timeout(DEADLINE, stream.next())
        .await
        .expect("nothing came in time")
        .expect("the stream ended")
}

pub(crate) fn code(error: kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        other => panic!("not an answer of the API: {other}"),
    }
}

//! The Secret and the webhook configurations, as one replica and several keep them.

use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use prometheus_client::registry::Registry;
use scheduler::certificates::metrics::CertificateMetrics;
use scheduler::certificates::{CertificateSettings, Keeper};
use serde_json::{Value, json};

use crate::api::{Api, MUTATING, SECRET, VALIDATING};

pub(crate) const DAY: Duration = Duration::from_secs(86_400);
pub(crate) const HOST: &str = "gpushare-webhook.gpushare-system.svc";

pub(crate) fn keeper(api: &Api, registry: &mut Registry) -> Keeper {
    let settings = CertificateSettings {
        secret: "certificates".to_owned(),
        namespace: "gpushare-system".to_owned(),
        hosts: vec![HOST.to_owned()],
        lifetime: 90 * DAY,
        configuration: Some("gpushare-scheduler".to_owned()),
    };
    Keeper::new(api.client(), settings, CertificateMetrics::register(registry))
}

fn configuration(names: &[&str]) -> Value {
    let webhooks: Vec<Value> = names
        .iter()
        .map(|name| json!({"name": name, "clientConfig": {"service": {"name": "gpushare-webhook", "namespace": "gpushare-system"}}}))
        .collect();
    json!({"metadata": {"name": "gpushare-scheduler"}, "webhooks": webhooks})
}

pub(crate) fn part(api: &Api, part: &str) -> Vec<u8> {
    let value = api.object(SECRET).unwrap()["data"][part].clone();
    serde_json::from_value::<ByteString>(value).unwrap().0
}

fn data(api: &Api) -> Value {
    api.object(SECRET).unwrap()["data"].clone()
}

#[tokio::test]
async fn the_secret_and_the_webhook_configurations_are_written() {
    let api = Api::default();
    api.put(MUTATING, configuration(&["mutate.pods.gpushare"]));
    api.put(
        VALIDATING,
        configuration(&["validate.pods.gpushare", "validate.bindings.gpushare"]),
    );
    let mut keeper = keeper(&api, &mut Registry::default());
    let now = SystemTime::now();
    keeper.reconcile(now).await.unwrap();
    assert_eq!(
        api.writes(),
        [
            format!("POST {SECRET}"),
            format!("PATCH {MUTATING}"),
            format!("PATCH {VALIDATING}")
        ]
    );
    let bundle = data(&api)["ca.crt"].clone();
    for path in [MUTATING, VALIDATING] {
        let object = api.object(path).unwrap();
        for webhook in object["webhooks"].as_array().unwrap() {
            assert_eq!(webhook["clientConfig"]["caBundle"], bundle);
            assert_eq!(
                webhook["clientConfig"]["service"]["name"], "gpushare-webhook",
                "the rest stays"
            );
        }
    }
    keeper.reconcile(now).await.unwrap();
    assert_eq!(api.writes().len(), 3, "nothing is due");
    api.put(MUTATING, configuration(&["mutate.pods.gpushare"]));
    keeper.reconcile(now).await.unwrap();
    assert_eq!(
        api.object(MUTATING).unwrap()["webhooks"][0]["clientConfig"]["caBundle"],
        bundle,
        "applied again without it"
    );
}

#[tokio::test]
async fn concurrent_replicas_agree_on_one_authority() {
    let api = Api::default();
    let now = SystemTime::now();
    let mut keepers: Vec<Keeper> = (0..4).map(|_| keeper(&api, &mut Registry::default())).collect();
    futures::future::try_join_all(keepers.iter_mut().map(|keeper| keeper.reconcile(now)))
        .await
        .unwrap();
    assert_eq!(
        api.writes(),
        [format!("POST {SECRET}")],
        "one makes it, the others take it over"
    );
    let authority = part(&api, "ca.crt");
    let later = now + 61 * DAY;
    futures::future::try_join_all(keepers.iter_mut().map(|keeper| keeper.reconcile(later)))
        .await
        .unwrap();
    assert_eq!(api.writes().len(), 2, "one renews it: {:?}", api.writes());
    assert_eq!(part(&api, "ca.crt"), authority);
}

#[tokio::test]
async fn a_deleted_secret_is_written_again_with_the_same_authority() {
    let api = Api::default();
    let mut keeper = keeper(&api, &mut Registry::default());
    keeper.reconcile(SystemTime::now()).await.unwrap();
    let before = data(&api);
    api.remove(SECRET);
    keeper.reconcile(SystemTime::now()).await.unwrap();
    assert_eq!(data(&api), before);
}

#[tokio::test]
async fn a_malformed_secret_and_foreign_entries_are_not_overwritten() {
    let api = Api::default();
    let secret = |data: Value| json!({"metadata": {"name": "certificates", "namespace": "gpushare-system"}, "data": data});
    api.put(SECRET, secret(json!({"ca.crt": "bm9uc2Vuc2U="})));
    let mut keeper = keeper(&api, &mut Registry::default());
    let error = format!("{:#}", keeper.reconcile(SystemTime::now()).await.unwrap_err());
    assert_eq!(
        error,
        "Secret gpushare-system/certificates: ca.crt holds something that is no certificate"
    );
    assert_eq!(api.writes(), [""; 0]);
    api.put(SECRET, secret(json!({"note": "aGVsbG8="})));
    keeper.reconcile(SystemTime::now()).await.unwrap();
    assert_eq!(part(&api, "note"), b"hello");
    assert!(!part(&api, "tls.crt").is_empty());
}

#[tokio::test]
async fn a_refused_write_is_repeated() {
    let api = Api::default();
    let mut keeper = keeper(&api, &mut Registry::default());
    api.fail(&[403]);
    let error = format!("{:#}", keeper.reconcile(SystemTime::now()).await.unwrap_err());
    assert!(error.starts_with("cannot read the Secret"), "{error}");
    // Another replica is faster, and its Secret is then deleted: 409 to the write, 404 to the next read.
    api.fail(&[404, 409]);
    keeper.reconcile(SystemTime::now()).await.unwrap();
    assert_eq!(api.writes(), [format!("POST {SECRET}")]);
}

#[tokio::test]
async fn a_client_certificate_is_issued_by_the_same_authority() {
    use std::os::unix::fs::PermissionsExt;

    use scheduler::certificates::issue::{CertificateOrder, issue};

    let api = Api::default();
    let folder = tempfile::tempdir().unwrap();
    let (secret, namespace) = ("certificates".to_owned(), "gpushare-system".to_owned());
    let order = CertificateOrder {
        secret,
        namespace,
        name: "kube-scheduler".to_owned(),
        lifetime: 365 * DAY,
    };
    assert!(
        issue(api.client(), &order, folder.path()).await.is_err(),
        "there is no authority yet"
    );
    keeper(&api, &mut Registry::default())
        .reconcile(SystemTime::now())
        .await
        .unwrap();
    for _ in 0..2 {
        issue(api.client(), &order, folder.path()).await.unwrap();
    }
    assert_eq!(
        std::fs::read(folder.path().join("ca.crt")).unwrap(),
        part(&api, "ca.crt")
    );
    let mode = std::fs::metadata(folder.path().join("client.key"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    assert_eq!(api.writes().len(), 1, "nothing of the cluster changes");
}

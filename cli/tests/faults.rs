//! The real program meets faults: each ends with a sentence that says what to do, and with the right exit code.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use proto::read_api::{Amount, Gpu, Node, State, Totals};
use rstest::rstest;

/// Status and body of the answer to a path.
type Answers = fn(&str) -> (u16, &'static str);

/// An HTTP server of these answers; returns its address.
fn serve(answers: Answers) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer_all(stream, answers));
        }
    });
    address
}

/// Answers requests until the client disconnects.
fn answer_all(stream: TcpStream, answers: Answers) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let mut head = String::new();
        reader.read_line(&mut head).ok().filter(|n| *n > 0)?;
        let path = head.split(' ').nth(1)?.to_owned();
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
            if line.trim().is_empty() {
                break;
            }
        }
        std::io::copy(&mut reader.by_ref().take(length), &mut std::io::sink()).ok()?;
        let (status, body) = answers(path.split('?').next()?);
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .ok()?;
    }
}

fn program() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_kubectl-gpushare"));
    program
        .env_clear()
        .env("HOME", "/nonexistent")
        .env("LANG", "C.UTF-8");
    program
}

fn run(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

/// A new file with this text. Its name has the ID of the process, since other test runs may use the same folder.
fn file(text: &str) -> String {
    static N_FILES: AtomicU32 = AtomicU32::new(0);
    let number = N_FILES.fetch_add(1, Ordering::Relaxed);
    let name = format!("{}-{number}.yaml", std::process::id());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A manifest of one pod.
const POD: &str = "kind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c}]}\n";

/// The flag for the read API of [`sound`].
fn read_api() -> String {
    format!("--read-api={}", serve(sound))
}

/// The flag for a kubeconfig with an API server at an address.
fn kubeconfig(address: &str) -> String {
    let text = format!(
        "{{apiVersion: v1, kind: Config, current-context: c, clusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}], \
         users: [{{name: u, user: {{token: t}}}}], contexts: [{{name: c, context: {{cluster: c, user: u}}}}]}}"
    );
    format!("--kubeconfig={}", file(&text))
}

/// Asserts the exit code, and that standard error says this.
fn check(output: &Output, code: i32, said: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        (output.status.code(), error.contains(said)),
        (Some(code), true),
        "{error}"
    );
}

const FORBIDDEN: &str = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"pods is forbidden: User \"u\" cannot list"}"#;

fn forbidden(_: &str) -> (u16, &'static str) {
    (403, FORBIDDEN)
}

/// The read API of a scheduler without nodes.
fn sound(path: &str) -> (u16, &'static str) {
    match path {
        "/v1/doctor" => (200, r#"{"replica":{"version":"0.1.0","leading":true}}"#),
        "/v1/state" => (200, r#"{"apiVersion":"v1","revision":"e-1"}"#),
        "/v1/fit" => (
            200,
            r#"{"asked":"8 units","replicas":2,"fitting":1,"blocked":{"not enough":1}}"#,
        ),
        "/v1/pods/default/waits/explain" => (
            200,
            r#"{"namespace":"default","name":"waits","asked":"8 units","nodes":1}"#,
        ),
        // A node takes the pod, but its group is refused.
        "/v1/pods/default/refused/explain" => (
            200,
            r#"{"namespace":"default","name":"refused","nodes":1,"fitting":1,"group":{"name":"g","domain":"link","refused":"no link group"}}"#,
        ),
        "/v1/pods/default/runs/explain" => (200, r#"{"namespace":"default","name":"runs","node":"n1"}"#),
        _ => (404, "there is no pod \"default/x\" that asks for devices\n"),
    }
}

#[rstest]
#[case::usage(&["top", "--bad"], 1, "unexpected argument")]
#[case::namespace_of_top(&["top", "-n", "x"], 1, "this command takes no --namespace: top shows nodes, and `kubectl gpushare top pods`")]
#[case::namespace_of_doctor(&["-n", "x", "doctor"], 1, "the namespace of the installation is that of --gpushare-namespace")]
#[case::order_of_changes(&["top", "pods", "-w", "--sort-by=used"], 1, "cannot be used with")]
#[case::no_kubeconfig(&["top"], 1, "cannot use the kubeconfig")]
#[case::missing_kubeconfig(&["top", "--kubeconfig=/nonexistent/config"], 1, "Name one with --kubeconfig")]
#[case::read_api_away(&["top", "--read-api=127.0.0.1:1"], 1, "cannot reach the read API at 127.0.0.1:1")]
#[case::what_to_do(&["top", "--read-api=127.0.0.1:1"], 1, "Correct --read-api, or leave it out")]
#[case::no_file(&["fits", "-f", "/nonexistent/pod.yaml"], 1, "cannot read /nonexistent/pod.yaml")]
#[case::no_domain(&["fits", "-f", "x", "--domain=rack"], 1, "[possible values: any, node, link]")]
#[case::too_many(&["fits", "-f", "x", "--replicas=99999"], 1, "99999 is not in 1..=10000")]
fn without_a_cluster(#[case] args: &[&str], #[case] code: i32, #[case] said: &str) {
    let needs_file = args.contains(&"/nonexistent/pod.yaml");
    let mut program = program();
    if needs_file {
        program.arg(format!("--read-api={}", serve(sound)));
    }
    check(&program.args(args).output().unwrap(), code, said);
}

#[rstest]
#[case::yes(&["top"], 0, "")]
#[case::runs(&["explain", "pod", "runs"], 0, "")]
#[case::waits(&["explain", "waits"], 2, "")]
#[case::its_group_is_refused(&["explain", "refused"], 2, "")]
#[case::no_such_pod(&["explain", "x"], 1, "that asks for devices; name another namespace with -n")]
#[case::order_of_json(&["top", "--sort-by=alloc", "-o", "json"], 1, "--sort-by orders the rows of a table")]
#[case::strange_name(&["explain", "a b"], 1, "is no name of a pod")]
fn answers_of_a_scheduler(#[case] args: &[&str], #[case] code: i32, #[case] said: &str) {
    let output = program()
        .arg(format!("--read-api={}", serve(sound)))
        .args(args)
        .output()
        .unwrap();
    check(&output, code, said);
}

/// A scheduler of 15,000 nodes with eight GPUs each.
fn large(path: &str) -> (u16, &'static str) {
    static STATE: LazyLock<String> = LazyLock::new(|| {
        let gpu = |minor| Gpu {
            minor,
            healthy: true,
            memory: Amount {
                total: 80 << 30,
                allocated: 8 << 30,
            },
            ..Gpu::default()
        };
        let node = |at| Node {
            name: format!("n{at:05}"),
            gpus: (0..8).map(gpu).collect(),
            ..Node::default()
        };
        let mut state = State {
            nodes: (0..15_000).map(node).collect(),
            ..State::default()
        };
        for node in &state.nodes {
            state.totals.add(&Totals::of_node(node));
        }
        serde_json::to_string(&state).unwrap()
    });
    match path {
        "/v1/state" => (200, &STATE),
        _ => sound(path),
    }
}

#[test]
fn a_cluster_of_fifteen_thousand_nodes_has_a_row_for_each_gpu() {
    let address = serve(large);
    let top = |args: &[&str]| {
        let output = program()
            .arg(format!("--read-api={address}"))
            .arg("top")
            .args(args)
            .output()
            .unwrap();
        check(&output, 0, "");
        String::from_utf8(output.stdout).unwrap()
    };
    let table = top(&[]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + 15_000 * 8 + 1);
    assert!(lines[0].starts_with("NODE     GPU   MEMORY"), "{}", lines[0]);
    assert!(
        lines[120_000].starts_with("n14999     7   ["),
        "{}",
        lines[120_000]
    );
    assert_eq!(
        lines[120_001],
        "120000 GPUs on 15000 nodes: 937.5 TiB of 9375.0 TiB allocated (10 %)"
    );
    assert_eq!(top(&["--no-headers", "-o", "name"]).lines().count(), 15_000);
}

/// The forms of `-o` without rows, and the completion script.
#[rstest]
#[case::table(&["top"], "No node shares GPUs")]
#[case::json(&["top", "-o", "json"], "\"revision\": \"e-1\"")]
#[case::yaml(&["top", "-o", "yaml"], "revision: e-1\n")]
#[case::name(&["explain", "waits", "-o", "name"], "pod/waits\n")]
#[case::wide(&["explain", "waits", "-o", "wide"], "default/waits needs 8 units; 0 of 1 node take it.\n")]
#[case::completion(&["completion", "zsh"], "#compdef kubectl-gpushare")]
fn forms_of_the_output(#[case] args: &[&str], #[case] expected: &str) {
    let output = program()
        .arg(format!("--read-api={}", serve(sound)))
        .args(args)
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.contains(expected), "{output:?}");
}

/// An API server that has only the namespace `default`.
fn without_namespaces(path: &str) -> (u16, &'static str) {
    match path {
        "/api/v1/namespaces/default" => (200, r#"{"kind":"Namespace","metadata":{"name":"default"}}"#),
        "/api/v1/namespaces/hidden" => (403, FORBIDDEN),
        _ => empty_cluster(path),
    }
}

#[rstest]
#[case::pods(&["top", "pods", "-n", "x"], 1, "error: namespace \"x\" does not exist; `kubectl get namespaces` lists all")]
#[case::explain(&["explain", "p", "-n", "x"], 1, "error: namespace \"x\" does not exist")]
#[case::explain_by_name(&["explain", "x/p"], 1, "error: namespace \"x\" does not exist")]
#[case::fits(&["fits", "-f", "POD", "-n", "x"], 1, "error: namespace \"x\" does not exist")]
#[case::exists(&["top", "pods", "-n", "default"], 0, "in namespace default; -A shows all namespaces")]
#[case::no_right(&["top", "pods", "-n", "hidden"], 0, "in namespace hidden")]
fn a_namespace_that_does_not_exist(
    #[case] args: &[&str],
    #[case] code: i32,
    #[case] said: &str,
    #[values(true, false)] is_offline: bool,
) {
    let pod = file(POD);
    let config = kubeconfig(&serve(without_namespaces));
    let source = if is_offline {
        "--offline".to_owned()
    } else {
        read_api()
    };
    let mut program = program();
    program.arg(config).arg(source);
    for arg in args {
        program.arg(if *arg == "POD" { pod.as_str() } else { arg });
    }
    check(&program.output().unwrap(), code, said);
}

#[test]
fn the_manifests_of_a_folder() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("folder");
    std::fs::create_dir_all(&folder).unwrap();
    let json = r#"{"kind":"Pod","metadata":{"name":"q"},"spec":{"containers":[{"name":"c"}]}}"#;
    for (name, text) in [
        ("b.yml", POD),
        ("a.json", json),
        ("c.yaml", "kind: Service\n"),
        ("d.txt", "{"),
    ] {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let output = run(&[&read_api(), "fits", "-f", folder.to_str().unwrap()]);
    check(
        &output,
        2,
        "note: no pods in c.yaml: document 1 (Service/?); left out",
    );
    let out = String::from_utf8_lossy(&output.stdout);
    let (first, second) = (
        out.find("a.json: Pod/q (8 units each)"),
        out.find("b.yml: Pod/p (8 units each)"),
    );
    assert!(first.is_some() && first < second, "{out}");
}

#[test]
fn ten_documents_of_which_one_has_no_pod() {
    let pod = "kind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c}]}\n---\n";
    let text = pod.repeat(4) + "kind: Service\nmetadata: {name: s}\n---\n" + &pod.repeat(5);
    let path = file(&text);
    let output = run(&[&read_api(), "fits", "--replicas=2", "-f", &path]);
    check(&output, 2, "note: no pods in document 5 (Service/s); left out");
    let out = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        out.matches("Pod/p (8 units each): 1 of 2 pods fit").count(),
        9,
        "{out}"
    );
}

#[test]
fn the_json_of_fits_names_the_pods() {
    let path = file(POD);
    let output = run(&[&read_api(), "fits", "--replicas=2", "-o", "json", "-f", &path]);
    check(&output, 2, "");
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(
        out.contains("\"of\": \"Pod/p\",\n") && out.contains("\"fitting\": 1"),
        "{out}"
    );
}

#[test]
fn not_all_pods_fit() {
    let text = "kind: ConfigMap\nmetadata: {name: c}\n---\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [{name: c}]}\n";
    let path = file(text);
    let output = run(&[&read_api(), "fits", "--replicas=2", "-f", &path]);
    check(&output, 2, "no pods in document 1 (ConfigMap/c); left out");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 of 2 pods fit"));
}

/// A scheduler that does not know domains answers as if the pods might be on different nodes.
#[rstest]
#[case::link(
    "link",
    1,
    "this scheduler is older than the command, and does not know --domain"
)]
#[case::any("any", 2, "")]
fn a_domain_that_the_scheduler_does_not_know(#[case] domain: &str, #[case] code: i32, #[case] said: &str) {
    let output = run(&[
        &read_api(),
        "fits",
        &format!("--domain={domain}"),
        "-f",
        &file(POD),
    ]);
    check(&output, code, said);
}

#[test]
fn no_document_has_a_pod() {
    let path = file("kind: Service\nmetadata: {name: s}\n");
    let output = run(&[&read_api(), "fits", "-f", &path]);
    check(&output, 1, "no document has a pod");
}

#[test]
fn an_old_scheduler() {
    let old = serve(|_| (404, ""));
    let output = run(&[&format!("--read-api={old}"), "top"]);
    check(&output, 1, "does not serve version v1 of the read API");
}

/// The head of the first request that a command sends to the API server.
fn first_request(flags: &[&str]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let path = kubeconfig(&listener.local_addr().unwrap().to_string());
    let mut program = program()
        .arg("top")
        .arg(path)
        .args(flags)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept().unwrap();
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    program.kill().unwrap();
    program.wait().unwrap();
    head.join("\n")
}

#[test]
fn flags_of_kubectl_reach_the_api_server() {
    assert!(first_request(&["--as=jane"]).contains("impersonate-user: jane"));
    let path = "GET /api/v1/namespaces/elsewhere/pods?";
    assert!(first_request(&["--gpushare-namespace=elsewhere"]).starts_with(path));
}

const NO_DEVICES: &str = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"InternalError","code":500,"message":"etcdserver: no leader"}"#;

/// An API server that cannot read Device objects, which has passed for a cluster without devices.
fn unreadable_devices(path: &str) -> (u16, &'static str) {
    match path {
        "/apis/scheduling.koordinator.sh/v1alpha1/devices" => (500, NO_DEVICES),
        _ => empty_cluster(path),
    }
}

#[rstest]
#[case::no_such_context(empty_cluster, &["top", "--context=other"], "and a context of it with --context")]
#[case::no_rights(forbidden, &["top"], "the API server refuses to list nodes")]
// Half a cluster must not be shown as all of it.
#[case::a_list_that_fails(unreadable_devices, &["top", "--offline"], "cannot list devices")]
#[case::the_reason(unreadable_devices, &["top", "--offline"], "etcdserver: no leader")]
fn an_api_server_that_does_not_answer_all(
    #[case] answers: Answers,
    #[case] args: &[&str],
    #[case] said: &str,
) {
    let config = kubeconfig(&serve(answers));
    check(&program().arg(config).args(args).output().unwrap(), 1, said);
}

#[test]
fn the_api_server_is_away() {
    let output = run(&[&kubeconfig("127.0.0.1:1"), "top"]);
    check(&output, 1, "the API server does not answer");
}

/// An API server without a scheduler, whose cluster has no nodes.
fn empty_cluster(path: &str) -> (u16, &'static str) {
    match path {
        "/api/v1/namespaces/gpushare-system/pods" | "/api/v1/pods" => (
            200,
            r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}"#,
        ),
        "/api/v1/nodes" => (
            200,
            r#"{"kind":"NodeList","apiVersion":"v1","metadata":{},"items":[]}"#,
        ),
        _ => (
            404,
            r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,"message":"not found"}"#,
        ),
    }
}

#[test]
fn without_a_scheduler_the_objects_are_read() {
    let path = kubeconfig(&serve(empty_cluster));
    let output = run(&[&path, "top"]);
    check(&output, 0, "reading nodes, devices and pods instead");
    assert!(String::from_utf8_lossy(&output.stdout).contains("No node shares GPUs"));
}

/// The versions are shown as far as they are known, with a scheduler or without, and without a cluster.
#[test]
fn versions_without_a_scheduler() {
    let path = kubeconfig(&serve(empty_cluster));
    let version = |kubeconfig: &str, flags: &[&str]| {
        let mut program = program();
        program.env("KUBECONFIG", kubeconfig).arg("version").args(flags);
        let output = program.output().unwrap();
        check(&output, 0, "");
        String::from_utf8(output.stdout).unwrap()
    };
    let client = format!("Client Version: {}\n", env!("CARGO_PKG_VERSION"));
    let path = path.strip_prefix("--kubeconfig=").unwrap();
    assert_eq!(
        version(path, &[]),
        format!(
            "{client}not known: scheduler: no replica is ready in namespace gpushare-system; see `kubectl gpushare doctor`\n\
             not known: device plugins: namespace gpushare-system has no pod of them; see `kubectl gpushare doctor`\n"
        )
    );
    assert!(
        version(path, &["--offline"]).contains("not known: scheduler: with --offline no replica is asked\n")
    );
    let json = version(path, &["-o", "json", &read_api()]);
    assert!(json.contains("\"scheduler\": {\n    \"0.1.0\": 1\n"), "{json}");
    let nowhere = version("/nonexistent", &[]);
    assert!(
        nowhere.starts_with(&client) && nowhere.contains("not known: cannot use the kubeconfig"),
        "{nowhere}"
    );
}

#[test]
fn doctor_offline_asks_no_replica() {
    let path = kubeconfig(&serve(empty_cluster));
    let output = run(&["doctor", "--offline", &path]);
    check(&output, 2, "");
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(
        out.contains("unknown  read-api: with --offline no replica is asked"),
        "{out}"
    );
}

#[test]
fn doctor_finds_that_nothing_is_installed() {
    let path = kubeconfig(&serve(empty_cluster));
    let output = run(&[&path, "doctor"]);
    check(&output, 2, "");
    assert!(String::from_utf8_lossy(&output.stdout).contains("there is no Deployment gpushare-scheduler"));
}

#[test]
fn a_pipe_that_closes_is_no_failure() {
    let mut program = program()
        .args(["completion", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(program.stdout.take());
    let output = program.wait_with_output().unwrap();
    check(&output, 0, "");
    assert!(output.stderr.is_empty());
}

/// The stream of changes breaks off, and the scheduler comes back.
#[test]
fn watching_goes_on_after_a_break() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, lines) = std::sync::mpsc::channel();
    let mut program = program()
        .arg(format!("--read-api={address}"))
        .args(["top", "-w", "-o", "name"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(program.stdout.take().unwrap());
    thread::spawn(move || {
        out.lines()
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line))
    });
    thread::spawn(move || {
        for (turn, stream) in listener.incoming().flatten().enumerate() {
            follow(stream, turn);
        }
    });
    for expected in ["node/n0", "node/n1"] {
        let line = lines.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        assert_eq!(line, expected);
    }
    program.kill().unwrap();
    program.wait().unwrap();
}

/// Answers until changes are followed, sends one event, and ends the connection.
fn follow(stream: TcpStream, turn: usize) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let mut head = String::new();
        reader.read_line(&mut head).ok().filter(|n| *n > 0)?;
        let mut line = String::new();
        while reader.read_line(&mut line).ok()? > 2 {
            line.clear();
        }
        if head.contains("/changes") {
            let event = format!("event: node\ndata: {{\"name\":\"n{turn}\"}}\n\n");
            return write!(stream, "HTTP/1.1 200 OK\r\n\r\n{event}").ok();
        }
        let body = sound(head.split(' ').nth(1)?).1;
        write!(
            stream,
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .ok()?;
    }
}

const NO_MOVE: &str = r#"{"apiVersion":"v1","reached":true}"#;
const ONE_MOVE: &str = r#"{"apiVersion":"v1","reached":true,"moves":[{"namespace":"default","name":"p","uid":"1","from":"n1","to":"n2"}]}"#;
const CONFLICT: &str = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Conflict","code":409,"message":"the version does not match"}"#;
const POD_OF_SET: &str = r#"{"metadata":{"name":"p","uid":"1","resourceVersion":"7","ownerReferences":[{"kind":"ReplicaSet","name":"r","uid":"r","controller":true}]},"spec":{"nodeName":"n1"}}"#;
const PODS_BEFORE: &str = r#"{"items":[{"metadata":{"name":"p","uid":"1","resourceVersion":"7","ownerReferences":[{"kind":"ReplicaSet","name":"r","uid":"r","controller":true}]},"spec":{"nodeName":"n1"}}]}"#;
const PODS_AFTER: &str = r#"{"items":[{"metadata":{"name":"q","uid":"2","resourceVersion":"9","ownerReferences":[{"kind":"ReplicaSet","name":"r","uid":"r","controller":true}]},"spec":{"nodeName":"n2"}}]}"#;

/// A cluster in which the pod changes before its eviction, and the API server, which has started again after that, knows no rights
/// at first.
fn changing_cluster(path: &str) -> (u16, &'static str) {
    static N_EVICTIONS: AtomicU32 = AtomicU32::new(0);
    static N_LISTS: AtomicU32 = AtomicU32::new(0);
    // A conflict, the dry run and the eviction.
    let is_evicted = N_EVICTIONS.load(Ordering::Relaxed) >= 3;
    match path {
        "/v1/plan" if is_evicted => (200, NO_MOVE),
        "/v1/plan" => (200, ONE_MOVE),
        "/api/v1/namespaces/default/pods/p/eviction" => match N_EVICTIONS.fetch_add(1, Ordering::Relaxed) {
            0 => (409, CONFLICT),
            _ => (201, r#"{"kind":"Status","apiVersion":"v1","status":"Success"}"#),
        },
        "/api/v1/namespaces/default/pods/p" => (200, POD_OF_SET),
        "/api/v1/namespaces/default/pods" if !is_evicted => (200, PODS_BEFORE),
        "/api/v1/namespaces/default/pods" => match N_LISTS.fetch_add(1, Ordering::Relaxed) {
            0 => forbidden(path),
            _ => (200, PODS_AFTER),
        },
        _ => sound(path),
    }
}

#[test]
fn an_eviction_goes_on_after_a_conflict_and_while_the_api_server_starts() {
    let address = serve(changing_cluster);
    let read_api = format!("--read-api={address}");
    let command = ["plan", "free", "1Gi", "--evict", "--yes"];
    let output = run(&[&[kubeconfig(&address).as_str(), &read_api], &command[..]].concat());
    check(&output, 0, "default/p left n1; q is on n2");
}

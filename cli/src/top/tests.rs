//! Tables of `top`, as a terminal shows them.

use proto::read_api::{Amount, Gpu, Holder, Node, State, Totals};

use super::*;

const GIB: u64 = 1 << 30;

fn gpu(minor: u32, pods: &[(&str, u64)], stranded: u64) -> Gpu {
    let holders = pods.iter().map(|(name, gib)| Holder {
        namespace: "default".to_owned(),
        name: (*name).to_owned(),
        uid: format!("uid-{name}"),
        asked: format!("{gib} GiB"),
        memory: gib * GIB,
        ..Holder::default()
    });
    Gpu {
        minor,
        uuid: format!("GPU-{minor}"),
        healthy: true,
        memory: Amount {
            total: 16 * GIB,
            allocated: pods.iter().map(|(_, gib)| gib * GIB).sum(),
        },
        stranded: stranded * GIB,
        core: Amount {
            total: 100,
            allocated: 0,
        },
        sharers: Amount {
            total: 100,
            allocated: 1,
        },
        holders: holders.collect(),
        ..Gpu::default()
    }
}

fn state() -> State {
    let mut sick = gpu(1, &[], 0);
    sick.healthy = false;
    let nodes = vec![
        Node {
            name: "n1".to_owned(),
            model: "A100".to_owned(),
            gpus: vec![gpu(0, &[("a", 8), ("b", 4)], 0), sick],
            ..Node::default()
        },
        Node {
            name: "n2".to_owned(),
            plugin: Some("no pods are sent here: its pod is being deleted".to_owned()),
            gpus: vec![gpu(0, &[("c", 15)], 1)],
            ..Node::default()
        },
    ];
    let mut totals = Totals::default();
    for node in &nodes {
        totals.add(&Totals::of_node(node));
    }
    State {
        totals,
        nodes,
        pending_total: 1,
        ..State::default()
    }
}

fn shown(table: MakeTable, screen: &Screen, is_wide: bool) -> String {
    let state = state();
    render(&state, &table(&state.nodes, screen, is_wide), screen)
}

#[test]
fn a_row_for_each_gpu() {
    insta::assert_snapshot!(shown(gpus, &Screen::plain(120), false));
}

#[test]
fn a_row_for_each_node() {
    insta::assert_snapshot!(shown(nodes, &Screen::plain(120), false));
}

/// 4 GiB more than it has are allocated on GPU 0, and 16 GiB are free on GPU 1.
#[test]
fn an_overcommitted_gpu_takes_no_free_memory_from_another() {
    let node = Node {
        gpus: vec![gpu(0, &[("a", 20)], 0), gpu(1, &[], 0)],
        ..Node::default()
    };
    let table = nodes(&[node], &Screen::PLAIN, false).render(&Screen::PLAIN);
    assert!(table.contains(" 63 %   16.0 GiB"), "{table}");
}

#[test]
fn every_column() {
    insta::assert_snapshot!(shown(gpus, &Screen::PLAIN, true));
}

#[test]
fn rows_in_the_order_of_a_column() {
    let state = state();
    let order = |column: &str| {
        let mut table = gpus(&state.nodes, &Screen::plain(120), false);
        table.sort_by(column)?;
        let lines = table.render(&Screen::plain(120));
        let starts = lines.lines().skip(1).map(|line| line[..10].replace(' ', ""));
        Ok::<_, CommandFailure>(starts.collect::<Vec<_>>())
    };
    assert_eq!(order("alloc").unwrap(), ["n20", "n10", "n11"]);
    // GPUs that take no pods have no free memory, which is no amount.
    assert_eq!(order("FREE").unwrap(), ["n10", "n11", "n20"]);
    assert_eq!(order("health").unwrap(), ["n20", "n10", "n11"]);
    let failure = order("cpu").unwrap_err().to_string();
    assert_eq!(
        failure,
        "--sort-by cpu: the table has no such column; name one of NODE, GPU, MEMORY, ALLOC, FREE, STRANDED, CORE, PODS, HEALTH"
    );
}

#[test]
fn sixty_columns() {
    let lines = shown(gpus, &Screen::plain(60), false);
    insta::assert_snapshot!(lines);
    let table = lines.lines().take(4);
    assert!(table.into_iter().all(|line| line.chars().count() <= 60));
}

#[test]
fn an_empty_cluster() {
    let state = State::default();
    insta::assert_snapshot!(render(
        &state,
        &gpus(&state.nodes, &Screen::plain(80), false),
        &Screen::plain(80)
    ));
}

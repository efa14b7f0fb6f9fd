//! Tables of `top`, as a terminal shows them.

use proto::read_api::{Amount, Gpu, Holder, Node, State, Totals};

use super::*;
use crate::args::Format;

const GIB: u64 = 1 << 30;

fn screen(width: usize) -> Screen {
    Screen {
        width: Some(width),
        has_colour: false,
        has_blocks: false,
        has_headers: true,
        format: Format::Table,
    }
}

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

#[test]
fn a_row_for_each_gpu() {
    insta::assert_snapshot!(render(&state(), &screen(120), false));
}

#[test]
fn every_column() {
    insta::assert_snapshot!(render(
        &state(),
        &Screen {
            width: None,
            ..screen(0)
        },
        true
    ));
}

#[test]
fn sixty_columns() {
    let lines = render(&state(), &screen(60), false);
    insta::assert_snapshot!(lines);
    let table = lines.lines().take(4);
    assert!(table.into_iter().all(|line| line.chars().count() <= 60));
}

#[test]
fn an_empty_cluster() {
    insta::assert_snapshot!(render(&State::default(), &screen(80), false));
}

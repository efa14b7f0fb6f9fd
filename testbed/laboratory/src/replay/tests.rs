//! Whole replays of a trace that is made here.

use insta::assert_snapshot;

use super::*;

/// Nodes of two kinds, and pods whose sizes repeat.
pub(super) fn list(n_nodes: usize, n_pods: usize) -> PodList {
    let node = |at: usize| {
        format!(
            "n{at:03},{},262144,{},{}\n",
            16_000 * (1 + at % 3),
            1 + at % 4,
            ["T4", "V100"][at % 2]
        )
    };
    let nodes = (0..n_nodes).map(node).collect::<Vec<_>>().concat();
    let sizes = [
        (4000, 1, 500, ""),
        (2000, 1, 250, "T4"),
        (1000, 0, 0, ""),
        (8000, 1, 1000, "V100|T4"),
        (8000, 2, 1000, ""),
        (3000, 1, 810, ""),
    ];
    let pod = |at: usize| {
        let (cpu, gpus, milli, models) = sizes[at * 7 % 11 % sizes.len()];
        format!(
            "p{at:04},{cpu},4096,{gpus},{milli},{models},{},{}\n",
            at * 10,
            at * 10 + 700
        )
    };
    let pods = (0..n_pods).map(pod).collect::<Vec<_>>().concat();
    let nodes = trace::nodes_of(&format!("sn,cpu_milli,memory_mib,gpu,model\n{nodes}")).unwrap();
    let pods = trace::pods_of(&format!(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n{pods}"
    ))
    .unwrap();
    let world = objects::world(&nodes, &pods, Vec::new()).unwrap();
    PodList {
        name: "made".to_owned(),
        typical: typical_pods(&world),
        world,
    }
}

#[derive(clap::Parser)]
struct Parsed {
    #[command(flatten)]
    args: ReplayArgs,
}

fn args(text: &str) -> ReplayArgs {
    let words = ["replay"].into_iter().chain(text.split(' '));
    <Parsed as clap::Parser>::try_parse_from(words).unwrap().args
}

/// Results of the trace that is made here.
async fn replayed(text: &str) -> Vec<Summary> {
    let args = args(&format!("--nodes none --pods none --check-every 20 {text}"));
    let summaries = results(args, vec![list(20, 90)]).await;
    assert!(
        summaries
            .iter()
            .flat_map(|summary| &summary.runs)
            .all(|run| run.checks > 2),
        "invariants are checked all along"
    );
    summaries
}

/// Results of a whole command.
pub(super) async fn replayed_with(text: &str) -> Vec<Summary> {
    let args = args(text);
    let lists = read(&args).await.unwrap();
    results(args, lists).await
}

/// Results without the fields that depend on the machine.
async fn results(args: ReplayArgs, lists: Vec<PodList>) -> Vec<Summary> {
    let conditions = args
        .condition
        .iter()
        .map(|named| RunConditions::of(*named, Overrides::default()))
        .collect();
    let plan = ReplayPlan {
        lists,
        conditions,
        console: Console::new(true),
        args,
    };
    let mut summaries = replay(plan).await.unwrap();
    for run in summaries.iter_mut().flat_map(|summary| &mut summary.runs) {
        (run.seconds, run.filter_micros) = (0.0, 0.0);
    }
    summaries
}

#[tokio::test]
async fn policies_are_compared_under_each_condition() {
    let summaries =
        replayed("--policy kube-default,fgd,best-fit,fullest,random --condition P,A,S --seeds 1,2").await;
    assert_snapshot!(summary::render(&summaries));
    let svg = plot::bars(
        "Policies",
        130,
        &summaries
            .iter()
            .filter(|summary| summary.conditions == "A")
            .collect::<Vec<_>>(),
    );
    assert_snapshot!(svg.unwrap());
}

#[tokio::test]
async fn a_seed_determines_the_result() {
    let [one, other] = ["--threads 1", "--threads 4"]
        .map(|threads| format!("--policy fill,binpack --condition A --seeds 4,5 {threads}"));
    let (one, other) = (replayed(&one).await, replayed(&other).await);
    for (one, other) in one.iter().zip(&other) {
        assert_eq!(one.curve, other.curve, "{}", one.policy);
    }
    assert_ne!(one[0].runs[0].curve, one[0].runs[1].curve);
}

/// Pods stay for 700 seconds and come every 10: no more than 70 are there together.
#[tokio::test]
async fn departed_pods_free_their_room() {
    let staying = replayed("--policy binpack --condition A --seeds 1 --tune 0").await;
    let leaving = replayed("--policy binpack --condition A --seeds 1 --tune 0 --departures").await;
    let last = |summary: &Summary| summary.curve.iter().map(|spread| spread.offered).max().unwrap();
    assert!(
        last(&leaving[0]) < last(&staying[0]),
        "{} {}",
        last(&leaving[0]),
        last(&staying[0])
    );
    assert!(leaving[0].runs[0].unplaced < staying[0].runs[0].unplaced);
    let stretched =
        replayed("--policy binpack --condition A --seeds 1 --tune 0 --departures --stretch 100").await;
    assert_eq!(
        last(&stretched[0]),
        last(&staying[0]),
        "no pod goes before the last one comes"
    );
}

#[tokio::test]
async fn evictions_shorten_the_waits_of_high_pods() {
    let mut tables = Vec::new();
    let mut mean_waits: Vec<f64> = Vec::new();
    for evictions in ["none", "make-room", "kube-scheduler", "both"] {
        let summaries = replayed(&format!(
            "--policy fill --condition P --seeds 2,3 --tune 3 --departures --evictions {evictions} --join 1,5"
        ))
        .await;
        let waits = summaries[0].runs.iter().map(|run| run.waits.as_ref().unwrap());
        assert_eq!(
            waits.clone().map(|waits| waits.left).sum::<usize>(),
            0,
            "all run at last"
        );
        mean_waits.push(waits.map(|waits| waits.high_hours[2]).sum::<f64>());
        tables.extend([
            summary::render_waits(&summaries),
            summary::render_joins(&summaries, &[1, 5]),
        ]);
    }
    let [none, make_room, kube_scheduler, both] = mean_waits.try_into().unwrap();
    assert!(make_room < none && both <= kube_scheduler && kube_scheduler < none);
    assert_snapshot!(tables.join("\n"));
}

/// All nodes but the last have one GPU, which kube-scheduler's sums take for two halves of different ones. It looks for 144 of
/// 300 nodes: the last one is in the third sample, and the first refusal changes the pod's condition with any text.
#[tokio::test]
async fn a_pod_whose_sample_has_no_fitting_node_is_tried_again() {
    let nodes = (0..300)
        .map(|at| format!("n{at:03},16000,65536,{},T4\n", 1 + at / 299))
        .collect::<Vec<_>>()
        .concat();
    let nodes = trace::nodes_of(&format!("sn,cpu_milli,memory_mib,gpu,model\n{nodes}")).unwrap();
    let pods = trace::pods_of(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,1000,1024,2,500\np1,1000,1024,2,500\np2,1000,1024,2,500\n",
    );
    let world = objects::world(&nodes, &pods.unwrap(), Vec::new()).unwrap();
    let replayed = async |condition: &str| {
        let list = PodList {
            name: "made".to_owned(),
            typical: typical_pods(&world),
            world: world.clone(),
        };
        let args = args(&format!(
            "--nodes none --pods none --policy fill --seeds 1 --tune 0 --condition {condition}"
        ));
        let run = results(args, vec![list]).await[0].runs[0].clone();
        (run.unplaced, run.sample_refusals, run.missed)
    };
    assert_eq!(replayed("P").await, (1, 0, 0), "all nodes are looked at");
    // The search for the second pod begins at node 132, where that for the first ended: the last node is in its second sample.
    assert_eq!(replayed("S").await, (1, 2 + 1, 0));
}

#[test]
fn factors_are_bounded() {
    assert_eq!(factor("1.3"), Ok(1.3));
    for text in ["-1", "1e9", "NaN", "much"] {
        assert!(factor(text).is_err(), "{text}");
    }
}

#[test]
fn seeds_are_numbers_and_ranges() {
    assert_eq!(seeds("42-44,7"), Ok(vec![42, 43, 44, 7]));
    assert_eq!(
        seeds("x").unwrap_err(),
        r#""x" is no seed: write numbers such as 1,2,3 or 42-51"#
    );
}

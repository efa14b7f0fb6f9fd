//! `plan`: the moves by which a node or GPUs become empty, or free memory comes together; with `--evict` `evict` makes them.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use k8s_openapi::api::core::v1::Node;
use proto::read_api::{LeftPod, PlanAnswer, PlanGoal, PlanLimits, PlanRequest, PodVolumes};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::args::{PlanArgs, PlannedGoal};
use crate::connection::ClusterConnection;
use crate::evict::{Eviction, node_and_gpus};
use crate::failure::{CommandFailure, CommandResult};
use crate::format::{count, joined, memory};
use crate::jobs;
use crate::output::{Colour, Screen, TextTable, text};
use crate::source::AnswerSource;
use crate::volumes;

/// The exit code for a goal that names something which does not exist.
const NO_SUCH_GOAL: u8 = 2;
pub(crate) const NOT_REACHED: u8 = 3;

pub(crate) async fn run(connection: &ClusterConnection, screen: &Screen, args: &PlanArgs) -> CommandResult {
    let mut source = AnswerSource::open(connection, screen).await?;
    let asked = match ask(connection, &mut source, args).await {
        Ok(asked) => asked,
        Err(failure) => return or_no_such_goal(screen, Err(failure)),
    };
    let planned_at = Instant::now();
    let AskedPlan {
        request,
        answer,
        of_jobs,
    } = asked;
    let names = answer
        .moves
        .iter()
        .map(|one| format!("pod/{}", one.display_name()));
    screen.show(&answer, names, |_| {
        render(&args.goal, args.max_moves, &answer, screen)
    })?;
    if !args.evict {
        return Ok(ExitCode::from(if answer.reached { 0 } else { NOT_REACHED }));
    }
    let eviction = Eviction {
        connection,
        screen,
        source,
        args,
        request,
        planned_at,
        of_jobs,
        // Replaced before the first move: until then Ctrl-C ends the process.
        interrupted: watch::channel(false).1,
    };
    eviction.run(answer).await
}

/// Turns a refusal into the exit code for a goal that does not exist, by which scripts distinguish it from other failures.
pub(crate) fn or_no_such_goal(screen: &Screen, ended: CommandResult) -> CommandResult {
    let Err(CommandFailure::Refused(sentence)) = ended else {
        return ended;
    };
    screen.complain(&format!("error: {sentence}"));
    Ok(ExitCode::from(NO_SUCH_GOAL))
}

/// The first plan, which the user sees.
pub(crate) struct AskedPlan {
    /// The request; each new plan during evictions is asked for by the same, with stricter limits.
    pub(crate) request: PlanRequest,
    pub(crate) answer: PlanAnswer,
    /// UIDs of the pods that must not be evicted because of their Jobs, which the scheduler does not know.
    pub(crate) of_jobs: BTreeSet<String>,
}

/// Asks for the first plan; and once more with the volumes of pods that stay because of them, which may let these move.
pub(crate) async fn ask(
    connection: &ClusterConnection,
    source: &mut AnswerSource,
    args: &PlanArgs,
) -> Result<AskedPlan, CommandFailure> {
    let mut request = PlanRequest {
        goal: goal(connection, &args.goal).await?,
        limits: PlanLimits {
            max_moves: args.max_moves,
            min_run_seconds: args.min_runtime.as_secs(),
            volumes: PodVolumes::new(),
        },
    };
    let mut answer = source.plan(&request).await?;
    request.limits.volumes = volumes::of_pods(connection, &answer.left).await;
    if !request.limits.volumes.is_empty() {
        match source.plan(&request).await {
            // The first plan holds without the volumes.
            Err(failure) if failure.is_temporary() => request.limits.volumes.clear(),
            with_volumes => answer = with_volumes?,
        }
    }
    let of_jobs = match jobs::obstacles(connection, &answer.moves).await {
        // Without the right to read pods the plan is still worth showing, but not evicting by.
        Err(_) if !args.evict => BTreeMap::new(),
        found => found?,
    };
    leave(&args.goal, &mut answer, &of_jobs);
    Ok(AskedPlan {
        request,
        answer,
        of_jobs: of_jobs.into_keys().collect(),
    })
}

/// Lists the pods that have a reason by UID among those that stay. Other pods can leave the node or GPUs of a goal all the same,
/// so only these moves are taken out; a plan for free memory needs all its moves, so it does not reach its goal.
fn leave(goal: &PlannedGoal, answer: &mut PlanAnswer, reasons: &BTreeMap<String, String>) {
    for one in &answer.moves {
        if let Some(reason) = reasons.get(&one.uid) {
            answer.left.push(LeftPod {
                namespace: one.namespace.clone(),
                name: one.name.clone(),
                uid: one.uid.clone(),
                reason: reason.clone(),
                ..LeftPod::default()
            });
        }
    }
    if node_and_gpus(goal).is_some() {
        answer.moves.retain(|one| !reasons.contains_key(&one.uid));
    } else {
        answer.reached &= reasons.is_empty();
    }
}

/// The goal as the read API takes it; the names of nodes stand for their label selector.
async fn goal(connection: &ClusterConnection, asked: &PlannedGoal) -> Result<PlanGoal, CommandFailure> {
    Ok(match asked {
        PlannedGoal::EmptyNode { node } => PlanGoal::EmptyNode { node: node.clone() },
        PlannedGoal::EmptyGpus { node, gpus } => PlanGoal::EmptyGpus {
            node: node.clone(),
            gpus: gpus.clone(),
        },
        PlannedGoal::Free { bytes, gpus, on } => PlanGoal::Free {
            bytes: *bytes,
            gpus: *gpus,
            nodes: match on {
                Some(selector) => Some(nodes_with(connection, selector).await?),
                None => None,
            },
        },
        PlannedGoal::Join => PlanGoal::Join {},
    })
}

/// The names of the nodes that a label selector selects.
async fn nodes_with(connection: &ClusterConnection, selector: &str) -> Result<Vec<String>, CommandFailure> {
    let nodes = match connection.list::<Node>(None, Some(selector)).await {
        // The API server's answer to a selector that does not parse.
        Err(CommandFailure::Api {
            code: 400, reason, ..
        }) => {
            return Err(CommandFailure::Refused(format!(
                "--on {selector:?} is no label selector: {reason}"
            )));
        }
        nodes => nodes?,
    };
    if nodes.is_empty() {
        return Err(CommandFailure::Refused(format!(
            "no node has the labels {selector:?}; `kubectl get nodes --show-labels` shows those that there are"
        )));
    }
    Ok(nodes.into_iter().filter_map(|node| node.metadata.name).collect())
}

/// The outcome of a plan in words, and their colour.
fn verdict(goal: &PlannedGoal, max_moves: usize, answer: &PlanAnswer) -> (Colour, String) {
    let n = answer.moves.len();
    let moves = count(n as u64, "move");
    let (reach, come) = if n == 1 {
        ("reaches", "comes")
    } else {
        ("reach", "come")
    };
    match (answer.reached, n) {
        // `join` has no amount to reach: it is reached if no further move helps.
        (true, 0) if matches!(goal, PlannedGoal::Join) => (Colour::Yellow, "no move helps".to_owned()),
        (true, 0) if !answer.left.is_empty() => (Colour::Yellow, "no pod may move".to_owned()),
        (true, 0) => (Colour::Green, "nothing has to move".to_owned()),
        (true, _) => (Colour::Green, format!("{moves} {reach} the goal")),
        (false, 0) => (Colour::Yellow, "no move helps".to_owned()),
        (false, _) if n >= max_moves => (
            Colour::Yellow,
            format!("{moves} {come} nearest to the goal, and --max-moves allows no more"),
        ),
        (false, _) => (
            Colour::Yellow,
            format!("no plan was found that reaches the goal; {moves} {come} nearest"),
        ),
    }
}

fn render(goal: &PlannedGoal, max_moves: usize, answer: &PlanAnswer, screen: &Screen) -> String {
    let (colour, verdict) = verdict(goal, max_moves, answer);
    let mut lines = format!("Plan {}: {}.\n", answer.plan_id, screen.paint(colour, &verdict));
    if !answer.moves.is_empty() {
        let mut table = TextTable::new([
            text("POD", 0),
            text("FROM", 0),
            text("GPUS", 1),
            text("TO", 0),
            text("GPUS", 1),
        ]);
        for one in &answer.moves {
            table.push([
                one.display_name().into(),
                one.from.as_str().into(),
                joined(&one.from_gpus, ",").into(),
                one.to.as_str().into(),
                joined(&one.to_gpus, ",").into(),
            ]);
        }
        lines += &table.render(screen);
    }
    if !answer.left.is_empty() {
        lines += &format!("Left: {}\n", count(answer.left.len() as u64, "pod"));
        let mut table = TextTable::new([text("POD", 0), text("REASON", 0)]);
        for one in &answer.left {
            table.push([one.display_name().into(), one.reason.as_str().into()]);
        }
        lines += &table.render(screen);
    }
    if !answer.moves.is_empty() {
        // The scheduler counts also the pods that this command has taken out of the moves because of their Jobs.
        let has_jobs = answer.price.restarts as usize > answer.moves.len();
        let with_jobs = if has_jobs {
            ", both with the pods of Jobs that are left"
        } else {
            ""
        };
        lines += &format!(
            "Gain: {}. Price: {}, {:.1} GiB hours of work{with_jobs}.\n",
            memory(answer.gain),
            count(answer.price.restarts, "restart"),
            answer.price.gib_hours
        );
    }
    if let PlannedGoal::EmptyNode { node } = goal {
        let drain = format!(
            "`kubectl drain {node} --ignore-daemonsets` evicts every pod that is left, also those in the table.\n"
        );
        lines += &screen.wrap(0, &drain);
    }
    lines
}

#[cfg(test)]
mod tests {
    use proto::read_api::{PlanPrice, PlannedMove};

    use super::*;

    fn answer() -> PlanAnswer {
        let one = |name: &str, to: &str| PlannedMove {
            namespace: "team".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            from: "n17".to_owned(),
            from_gpus: vec![0, 1],
            to: to.to_owned(),
            to_gpus: vec![3],
        };
        PlanAnswer {
            plan_id: "1f".to_owned(),
            reached: true,
            moves: vec![one("web-a", "n2"), one("web-b", "n11")],
            gain: 40 << 30,
            price: PlanPrice {
                restarts: 2,
                gib_hours: 12.25,
            },
            ..PlanAnswer::default()
        }
    }

    fn left() -> LeftPod {
        LeftPod {
            uid: "uid-hidden".to_owned(),
            reason: "its annotation forbids the eviction".to_owned(),
            ..LeftPod::default()
        }
    }

    #[test]
    fn plans() {
        let empty_node = PlannedGoal::EmptyNode {
            node: "n17".to_owned(),
        };
        let partial = PlanAnswer {
            reached: false,
            moves: answer().moves[..1].to_vec(),
            left: vec![left()],
            price: PlanPrice {
                restarts: 1,
                ..answer().price
            },
            ..answer()
        };
        let mut of_job = answer();
        let reasons = [(
            "uid-web-b".to_owned(),
            "Job web is at its back-off limit".to_owned(),
        )];
        leave(&empty_node, &mut of_job, &reasons.into());
        let nothing = PlanAnswer {
            plan_id: "0".to_owned(),
            reached: true,
            ..PlanAnswer::default()
        };
        let stuck = PlanAnswer {
            left: vec![left()],
            ..PlanAnswer::default()
        };
        let all_stay = PlanAnswer {
            left: vec![left()],
            ..nothing.clone()
        };
        let shown = [
            render(&empty_node, 10, &answer(), &Screen::PLAIN),
            render(&PlannedGoal::Join, 10, &partial, &Screen::PLAIN),
            render(&empty_node, 10, &of_job, &Screen::PLAIN),
            render(&PlannedGoal::Join, 10, &nothing, &Screen::PLAIN),
            render(&PlannedGoal::Join, 10, &stuck, &Screen::PLAIN),
            render(&empty_node, 1, &partial, &Screen::PLAIN),
            render(&empty_node, 10, &nothing, &Screen::PLAIN),
            render(&empty_node, 10, &all_stay, &Screen::PLAIN),
        ];
        insta::assert_snapshot!(shown.join("\n"));
    }
}

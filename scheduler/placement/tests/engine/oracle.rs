//! An allocator that tries every set of GPUs with every set of NICs, and so proves on small machines that the engine finds
//! a placement exactly when there is one, and that it is the best by the written rank.
//!
//! Written from the rules: lists instead of bits, whole sets instead of steps.

mod machine;
mod rules;

use placement::{Asking, DevicePolicy, Hints, Reason};
use proptest::prelude::*;

use machine::{Question, question};

/// What was chosen: minors of GPUs, and minors of NICs with the virtual function of each.
type Choice = (Vec<u32>, Vec<(u32, Option<String>)>);

fn chosen(question: &Question, policy: DevicePolicy) -> (Result<Choice, Reason>, Result<(), String>) {
    let mut fleet = question.fleet();
    let Some(id) = fleet.node_id("n") else {
        return (Err(Reason::NoDevice), Err("no node".to_owned()));
    };
    let requests = question.requests();
    let ask = question.ask(&requests);
    let choice = fleet.choose(id, ask, policy, Hints::Respect);
    let fit = fleet.fit(id, ask, Hints::Respect);
    let miss = fleet.miss(id, ask, Hints::Respect);
    let told = Asking::new(&fleet, ask, Hints::Respect).fit(id);
    let mut agree = Ok(());
    if choice.as_ref().map(drop).map_err(|reason| *reason) != fit
        || told != fit
        || fit.is_ok() != miss.is_none()
    {
        agree = Err(format!(
            "chosen {choice:?}, fit {fit:?}, told {told:?}, missed {miss:?}"
        ));
    }
    let placement = match choice {
        Err(reason) => return (Err(reason), agree),
        Ok(placement) => placement,
    };
    let before = fleet.check();
    if let Err(error) = fleet.reserve(&"asker".into(), id, &placement) {
        agree = Err(format!("{placement:?} cannot be reserved: {error}"));
    }
    if fleet.check() != before {
        agree = Err(format!("{placement:?} breaks {:?}", fleet.check()));
    }
    let nic = |share: &placement::DeviceShare| {
        (
            share.minor,
            share.functions.first().map(|function| function.id.to_string()),
        )
    };
    let gpus = placement.shares.iter().map(|share| share.minor).collect();
    (Ok((gpus, placement.others.iter().map(nic).collect())), agree)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// What the engine chooses is what trying everything finds best, and neither finds what the other does not.
    #[test]
    fn the_best_placement_is_found_exactly_when_there_is_one(question in question(), spread in any::<bool>()) {
        let policy = if spread { DevicePolicy::InOrder } else { DevicePolicy::Binpack };
        let (choice, agree) = chosen(&question, policy);
        prop_assert_eq!(agree, Ok(()));
        prop_assert_eq!(choice.ok(), rules::best(&question, policy));
    }
}

//! An allocator that tries every set of GPUs with every set of NICs, and so proves on small machines that the engine finds
//! a placement exactly when there is one, and that it is the best by the written rank.
//!
//! Written from the rules: lists instead of bits, whole sets instead of steps.

mod machine;
mod rules;

use placement::{DevicePolicy, Hints, Policies, Reason};
use proptest::prelude::*;

use machine::{Query, query};

/// A choice: minors of GPUs, and minors of NICs with the virtual function of each.
type Choice = (Vec<u32>, Vec<(u32, Option<String>)>);

fn chosen(query: &Query, policy: DevicePolicy) -> (Result<Choice, Reason>, Result<(), String>) {
    let mut fleet = query.fleet();
    let Some(id) = fleet.node_id("n") else {
        return (Err(Reason::NoDevice), Err("no node".to_owned()));
    };
    let requests = query.requests();
    let ask = query.ask(&requests);
    let choice = fleet.choose_devices(id, ask, policy, Hints::Respect);
    let fit = fleet.fit(id, ask, Hints::Respect);
    let misfit = fleet.misfit(id, ask, Hints::Respect);
    let batch_fit = fleet
        .evaluation(ask, Policies::default(), Hints::Respect)
        .evaluate(id)
        .map(drop);
    let mut agree = Ok(());
    if choice.as_ref().map(drop).map_err(|reason| *reason) != fit
        || batch_fit != fit
        || fit.is_ok() != misfit.is_none()
    {
        agree = Err(format!(
            "chosen {choice:?}, fit {fit:?}, batch fit {batch_fit:?}, misfit {misfit:?}"
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
    let nic = |share: &placement::Share| {
        (
            share.minor,
            share
                .virtual_functions
                .first()
                .map(|function| function.id.to_string()),
        )
    };
    let gpus = placement.gpus().map(|share| share.minor).collect();
    (Ok((gpus, placement.others().map(nic).collect())), agree)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// The engine and the oracle find the same best placement, or none.
    #[test]
    fn the_best_placement_is_found_exactly_when_there_is_one(query in query(), spread in any::<bool>()) {
        let policy = if spread { DevicePolicy::InOrder } else { DevicePolicy::Binpack };
        let (choice, agree) = chosen(&query, policy);
        prop_assert_eq!(agree, Ok(()));
        prop_assert_eq!(choice.ok(), rules::best(&query, policy));
    }
}

//! The preferred IDs.

use rstest::rstest;

use super::*;
use crate::tests::builders::fleet;

/// Asks with every ID of three GPUs of four slots available except `taken`.
fn prefer(
    resource: ExtendedResource,
    wanted: &[u32],
    must: &[&str],
    taken: &[&str],
    size: i32,
) -> Vec<String> {
    let fleet = fleet(3);
    let all = fleet
        .gpus
        .iter()
        .flat_map(|entry| fleet.ids.ids(resource, &entry.device.uuid).take(4));
    let request = ContainerPreferredAllocationRequest {
        available_device_ids: all.filter(|id| !taken.contains(&id.as_str())).collect(),
        must_include_device_ids: must.iter().map(|id| (*id).to_owned()).collect(),
        allocation_size: size,
    };
    let wanted: Vec<_> = wanted
        .iter()
        .map(|minor| fleet.gpus[*minor as usize].device.uuid.clone())
        .collect();
    let mut chosen = choose(&fleet, resource, &request, &wanted, &HashSet::new());
    if resource == ExtendedResource::Shared {
        for id in &mut chosen {
            *id = format!("{}-{}", &id[4..12], id.rsplit("::").next().unwrap());
        }
    }
    chosen
}

#[rstest]
#[case::of_the_wanted_gpu(&[1], &[], &[], 2, &["4ff516e8-0", "4ff516e8-1"])]
#[case::taken_ones_are_skipped(&[1], &[], &["4ff516e8-0"], 2, &["4ff516e8-1", "4ff516e8-2"])]
#[case::must_include_comes_first(&[1], &["9507230f-3"], &[], 2, &["9507230f-3", "4ff516e8-0"])]
#[case::the_rest_from_another_gpu(&[1], &[], &["4ff516e8-0", "4ff516e8-1", "4ff516e8-2"], 2, &["4ff516e8-3", "9507230f-0"])]
#[case::no_match_takes_the_fullest_that_suffices(&[], &[], &["44f120a6-0"], 3, &["44f120a6-1", "44f120a6-2", "44f120a6-3"])]
#[case::as_few_gpus_as_possible(&[], &[], &["9507230f-0"], 5, &["4ff516e8-0", "4ff516e8-1", "4ff516e8-2", "4ff516e8-3", "9507230f-1"])]
#[case::on_the_gpu_that_must_be_included(&[], &["44f120a6-3"], &[], 2, &["44f120a6-3", "44f120a6-0"])]
#[case::nothing(&[1], &[], &[], 0, &[])]
#[case::negative(&[1], &[], &[], -1, &[])]
fn preferred_memory_units_are_of_the_recorded_gpus(
    #[case] wanted: &[u32],
    #[case] must: &[&str],
    #[case] taken: &[&str],
    #[case] size: i32,
    #[case] expected: &[&str],
) {
    assert_eq!(
        prefer(ExtendedResource::Memory, wanted, must, taken, size),
        expected
    );
}

#[rstest]
#[case::one_per_device(&[2, 0], 2, &["00000002-0", "00000000-0"])]
#[case::again_from_the_first(&[2, 0], 3, &["00000002-0", "00000000-0", "00000002-1"])]
#[case::more_than_there_are(&[2], 5, &["00000002-0", "00000002-1", "00000002-2", "00000002-3", "00000000-0"])]
fn preferred_shares_are_one_per_recorded_gpu(
    #[case] wanted: &[u32],
    #[case] size: i32,
    #[case] expected: &[&str],
) {
    assert_eq!(prefer(ExtendedResource::Shared, wanted, &[], &[], size), expected);
}

/// An init container's ID is handed on; the device that it stands for is not taken a second time first.
#[test]
fn a_must_include_share_covers_its_gpu() {
    let fleet = fleet(3);
    let own = format!("{}::3", fleet.gpus[0].device.uuid);
    assert_eq!(
        prefer(ExtendedResource::Shared, &[0, 1], &[&own], &[], 2),
        ["00000000-3", "00000001-0"]
    );
}

/// kubelet may offer an ID that it has handed out a moment before.
#[rstest]
#[case::some_of_the_wanted_gpu(&["9507230f-0", "9507230f-2"], &["9507230f-1", "9507230f-3", "4ff516e8-0"])]
#[case::all_of_the_wanted_gpu(
    &["9507230f-0", "9507230f-1", "9507230f-2", "9507230f-3"],
    &["4ff516e8-0", "4ff516e8-1", "4ff516e8-2"]
)]
#[case::nearly_all(
    &["9507230f-0", "9507230f-1", "9507230f-2", "9507230f-3", "4ff516e8-0", "4ff516e8-1", "4ff516e8-2"],
    &["4ff516e8-3", "9507230f-0", "9507230f-1"]
)]
fn ids_that_were_just_allocated_are_preferred_last(#[case] in_use: &[&str], #[case] expected: &[&str]) {
    let fleet = fleet(2);
    let mut available = Vec::new();
    for entry in &fleet.gpus {
        let ids = fleet.ids.ids(ExtendedResource::Memory, &entry.device.uuid);
        available.extend(ids.take(4));
    }
    let request = ContainerPreferredAllocationRequest {
        available_device_ids: available,
        must_include_device_ids: Vec::new(),
        allocation_size: 3,
    };
    let wanted = [fleet.gpus[0].device.uuid.clone()];
    let in_use = in_use.iter().copied().collect();
    assert_eq!(
        choose(&fleet, ExtendedResource::Memory, &request, &wanted, &in_use),
        expected
    );
}

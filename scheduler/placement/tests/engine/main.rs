//! The engine through its public interface: tables of plain cases, and model-based tests with random sequences.

#[cfg(test)]
mod build;
#[cfg(test)]
mod cached_results;
#[cfg(test)]
mod choices;
#[cfg(test)]
mod facts;
#[cfg(test)]
mod groups;
#[cfg(test)]
mod inventories;
#[cfg(test)]
mod joint;
#[cfg(test)]
mod model;
#[cfg(test)]
mod model_based;
#[cfg(test)]
mod nodes_used;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod others;
#[cfg(test)]
mod plan;
#[cfg(test)]
mod preemption;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod reservations;
#[cfg(test)]
mod topology;
#[cfg(test)]
mod whole;

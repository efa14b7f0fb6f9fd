//! Whether what was chosen may still be had, as far as exclusions and virtual functions go.

use crate::fit::Hints;
use crate::holding::Placement;
use crate::ident::FunctionId;
use crate::node::Node;
use crate::reserve::ReserveError;
use crate::shape::Spot;
use crate::topology::uses::{Use, permits, widest};
use crate::wishes::Kind;

impl Node {
    /// # Errors
    /// If somebody keeps a device of the placement, it would keep one that others use, or a virtual function is taken.
    pub(crate) fn admit_by_rules(&self, placement: &Placement) -> Result<(), ReserveError> {
        let has_functions = placement.others.iter().any(|share| !share.functions.is_empty());
        if !self.has_rules && placement.exclusions.is_empty() && !has_functions {
            return Ok(());
        }
        let Some(shape) = &self.shape else { return Ok(()) };
        let uses = self.uses(Hints::Ignore);
        for share in &placement.shares {
            let at = self.gpus().iter().position(|gpu| gpu.uuid == share.gpu);
            if !admits(placement, &Kind::Gpu, at, &shape.spots.gpus, &uses.gpus) {
                return Err(ReserveError::Exclusive {
                    kind: Kind::Gpu,
                    device: share.gpu.to_string(),
                });
            }
        }
        let mut seen: Vec<&FunctionId> = Vec::new();
        for share in &placement.others {
            let kind = Kind::Other(share.kind.clone());
            let Some(of) = self.classes().iter().position(|class| class.kind == share.kind) else {
                continue;
            };
            let Some(class) = self.classes().get(of) else {
                continue;
            };
            let at = class.devices.iter().position(|device| device.id == share.id);
            let (spots, shared) = (
                shape.spots.others.get(of).map_or(&[][..], |spots| spots),
                uses.others.get(of),
            );
            if !admits(placement, &kind, at, spots, shared.map_or(&[], |uses| uses)) {
                return Err(ReserveError::Exclusive {
                    kind,
                    device: share.id.to_string(),
                });
            }
            let groups = at
                .and_then(|at| class.devices.get(at))
                .map_or(&[][..], |device| &device.traits.functions);
            for function in &share.functions {
                let exists = groups
                    .iter()
                    .flat_map(|group| &group.functions)
                    .any(|known| known.id == function.id);
                let is_held = uses
                    .functions
                    .get(of)
                    .is_some_and(|held| held.contains(&&function.id));
                if !exists || is_held || seen.contains(&&function.id) {
                    return Err(ReserveError::FunctionTaken {
                        function: function.id.clone(),
                    });
                }
                seen.push(&function.id);
            }
        }
        Ok(())
    }
}

fn admits(placement: &Placement, kind: &Kind, at: Option<usize>, spots: &[Spot], uses: &[Use]) -> bool {
    at.is_some_and(|at| permits(widest(&placement.exclusions, kind), at, spots, uses))
}
